"""Heads turn a request's features into a guess, from plain arrays and without scikit-learn.

Importing scikit-learn takes seconds and memory, and its ``predict`` of one row milliseconds; only
training needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from loomserve.platform.lengths.predict.embedding import Floats

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Guess:
    """Output length of a request before calibration.

    Attributes:
        tokens: Mean length, given the most tokens that the answer may have.
        low: 5 % quantile of the length, if nothing bounds it.
        high: 95 % quantile.
        median: 50 % quantile, given the most tokens that the answer may have.
        bucket: Number of the likeliest bucket.
    """

    tokens: float
    low: float
    high: float
    median: float
    bucket: int


class Head(Protocol):
    """Fitted model that guesses a length from features."""

    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        """Guess the length of an answer that may have ``most`` tokens."""

    def arrays(self) -> Arrays:
        """The arrays from which :meth:`of` makes an equal head."""

    @classmethod
    def of(cls, arrays: Arrays) -> Self: ...
