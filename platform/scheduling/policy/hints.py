"""Hints of a request for an engine's scheduler: its expected length, its deadline, its priority.

They travel under these keys in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

EXPECTED = "loomserve_expected_tokens"
"""A list of the expected number of tokens and of the high bound."""
DEADLINE = "loomserve_deadline"
"""Monotonic seconds of the machine that has the request; on its way to an engine, seconds left."""
BACKGROUND = "loomserve_background"
"""1: the request runs only beside others."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Predicted tokens of an answer; few exceed ``high``, and ``0 <= tokens <= high``."""

    tokens: float
    high: float

    def answer(self, generated: int, longest: int) -> int:
        """Estimate the whole answer's tokens after ``generated`` of at most ``longest``.

        The estimate is the prediction until the answer reaches it, then the high bound, then
        ``longest``. So a request that exceeds its prediction still has tokens left, and more of
        them with each bound that it passes: it is not first for ever.
        """
        for bound in (self.tokens, self.high):
            if generated < bound:
                return min(longest, math.ceil(bound))
        return longest


class RequestHints(NamedTuple):
    expected: Expected | None
    deadline_s: float | None
    background: bool

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> RequestHints:
        return cls(expected_of(extra_args), deadline_of(extra_args), is_background(extra_args))


def expected_of(extra_args: Mapping[str, Any] | None) -> Expected | None:
    """The prediction; None if there is none, or nonsense."""
    given = (extra_args or {}).get(EXPECTED)
    if not isinstance(given, list | tuple) or len(given) != 2:
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in given):
        return None
    tokens, high = given
    # An infinity or what is no number fails the comparison, and so does an absurd integer.
    return Expected(float(tokens), float(high)) if 0 <= tokens <= high < 2**53 else None


def deadline_of(extra_args: Mapping[str, Any] | None) -> float | None:
    """The deadline; None if there is none, or no finite number."""
    deadline = (extra_args or {}).get(DEADLINE)
    if not isinstance(deadline, int | float) or isinstance(deadline, bool):
        return None
    try:
        return float(deadline) if math.isfinite(deadline) else None
    except OverflowError:  # an integer beyond all floats
        return None


def is_background(extra_args: Mapping[str, Any] | None) -> bool:
    return (extra_args or {}).get(BACKGROUND) == 1
