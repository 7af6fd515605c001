"""What is asked about an answer's length, and what is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

COVERAGE = 0.9
"""The share of answers whose length is meant to lie within a prediction's interval."""


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """A request, as far as its answer's length may depend on it.

    Attributes:
        instruction: The application's part: the system prompt, or what repeats between its
            requests. May be empty.
        user_input: The user's part. May be empty.
        input_tokens: Of the whole prompt, as the one who asks counts them; at least 0.
        max_tokens: The most that may be generated; at least 1. None: no bound is known.
    """

    instruction: str
    user_input: str
    input_tokens: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Output tokens: expected, and an interval that holds :data:`COVERAGE` of the lengths.

    ``0 <= low <= tokens <= high``, and none of them exceeds the query's ``max_tokens``.
    """

    tokens: float
    low: float
    high: float


class Predictor(Protocol):
    """Answers within 3 ms (median, one core) and without I/O, but never call it on an event loop:
    long texts take longer. Safe to call from several threads."""

    def predict(self, query: LengthQuery) -> Prediction: ...
