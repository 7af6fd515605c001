"""A request's expected answer length, as an engine's scheduler receives it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPECTED = "loomserve_expected_tokens"
"""Key of the prediction in vLLM's ``vllm_xargs`` and ``SamplingParams.extra_args``: a list of the
expected number of tokens and of the high bound."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Predicted tokens of an answer; ``0 <= tokens <= high``.

    Attributes:
        tokens: The predicted number.
        high: Upper end of the prediction's interval, which few answers exceed.
    """

    tokens: float
    high: float

    def answer(self, generated: int, longest: int) -> int:
        """Estimate the whole answer's tokens after ``generated`` of them.

        The estimate is the prediction until the answer reaches it, then the high bound, then the
        most that the answer may have. So a request that exceeds its prediction still has tokens
        left, and more of them with each bound that it passes: it is not first for ever.

        Args:
            generated: Tokens that the answer has, at least 0.
            longest: Tokens that it may have; returned if it is not more than ``generated``.
        """
        for bound in (self.tokens, self.high):
            if generated < bound:
                return min(longest, math.ceil(bound))
        return longest


def expected_of(extra_args: Mapping[str, Any] | None) -> Expected | None:
    """The prediction among a request's ``extra_args``; None if there is none, or nonsense."""
    given = (extra_args or {}).get(EXPECTED)
    if not isinstance(given, list | tuple) or len(given) != 2:
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in given):
        return None
    tokens, high = given
    # An infinity or what is no number fails the comparison, and so does an absurd integer.
    return Expected(float(tokens), float(high)) if 0 <= tokens <= high < 2**53 else None
