"""What turns a request's features into a guess: plain arrays, read without scikit-learn.

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
    """Before calibration.

    Attributes:
        tokens: The mean length of answers that may have so many tokens and no more.
        low: 5 % of the answers would be shorter, whatever they may have.
        high: 5 % would be longer.
        bucket: The likeliest.
    """

    tokens: float
    low: float
    high: float
    bucket: int


class Head(Protocol):
    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        """``most``: tokens that the answer may have."""

    def arrays(self) -> Arrays:
        """What :meth:`of` makes an equal head from."""

    @classmethod
    def of(cls, arrays: Arrays) -> Self: ...
