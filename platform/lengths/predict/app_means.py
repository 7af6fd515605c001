"""The baseline that sees only which application asks: each application's mean length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.lengths.predict.buckets import bucket_of
from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.head import Arrays, Guess


@dataclass(frozen=True, eq=False)
class AppMeans:
    """Table of lengths by application.

    Attributes:
        apps: Numbers of the applications, ascending, shape ``[apps]``.
        values: Mean, 5 % and 95 % quantile of each application's lengths in tokens, and in the
            last row those of all lengths, for unknown applications; ``[apps + 1, 3]``.
    """

    apps: Floats
    values: NDArray[np.float64]

    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        at = int(np.searchsorted(self.apps, features[0]))
        known = at < len(self.apps) and self.apps[at] == features[0]
        tokens, low, high = map(float, self.values[at if known else -1])
        # The spread of an application's lengths is not kept, so `most` can only cut the mean, which
        # stands for the median.
        mean = min(most, tokens)
        return Guess(mean, low, high, mean, int(bucket_of(tokens)))

    def arrays(self) -> Arrays:
        return vars(self)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        return cls(**arrays)
