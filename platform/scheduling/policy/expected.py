"""How long an answer is expected to be, as the engine's scheduler is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPECTED = "loomserve_expected_tokens"
"""Where a request carries its prediction, in vLLM's ``vllm_xargs`` and
``SamplingParams.extra_args``: a list of the expected number of tokens and of the high bound."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens of an answer; ``0 <= tokens <= high``.

    Attributes:
        tokens: The predicted number.
        high: That only few answers exceed: the upper end of the prediction's interval.
    """

    tokens: float
    high: float

    def answer(self, generated: int, longest: int) -> int:
        """The whole answer's tokens, to the best knowledge after so many of them.

        What was predicted, until it is reached; then the high bound; beyond that all that it may
        have. So a request that exceeds its prediction is neither free, for something is always
        left of it, nor first for ever, for what is left grows with each bound that it passes.

        Args:
            generated: Tokens that the answer has, at least 0.
            longest: That it may have; returned if it is not more than ``generated``.
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
