"""What turns a request's features into a guess: plain arrays, read without scikit-learn.

Importing scikit-learn takes seconds and memory, and its ``predict`` of one row milliseconds; only
training needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from loomserve.platform.lengths.embedding import Floats

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Guess:
    """Before calibration: expected tokens, the 5 % and 95 % quantiles, and the likeliest bucket."""

    tokens: float
    low: float
    high: float
    bucket: int


class Head(Protocol):
    def guess(self, features: Floats) -> Guess: ...

    def arrays(self) -> Arrays:
        """What :meth:`of` makes an equal head from."""

    @classmethod
    def of(cls, arrays: Arrays) -> Self: ...
