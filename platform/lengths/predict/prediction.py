"""The question about an answer's length, and the prediction that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

COVERAGE = 0.9
"""Share of answers whose length is to lie within the prediction's interval."""


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """The properties of a request on which its answer's length may depend.

    Attributes:
        instruction: The application's text: the system prompt, or the text that its requests
            repeat. May be empty.
        user_input: The user's text. May be empty.
        input_tokens: Tokens of the whole prompt, by the caller's count; at least 0.
        max_tokens: The most tokens that may be generated; at least 1. None: no bound is known.
    """

    instruction: str
    user_input: str
    input_tokens: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected output tokens, and an interval that holds :data:`COVERAGE` of the lengths.

    ``0 <= low <= tokens <= high``, and none of them exceeds the query's ``max_tokens``.
    """

    tokens: float
    low: float
    high: float
    median: float
    """As likely exceeded as not."""


class Predictor(Protocol):
    """Predicts output lengths within 3 ms (median, one core), without I/O, from any thread.

    Long texts take longer, so it must not be called on an event loop.
    """

    def predict(self, query: LengthQuery) -> Prediction: ...
