"""A classifier of buckets on an embedding: UELLM (section 3.3.1) and S3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.lengths.predict.buckets import EDGES
from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.head import Arrays, Guess


@dataclass(frozen=True, eq=False)
class BucketClassifier:
    """Multinomial logistic regression on standardised features.

    Attributes:
        centre, scale: Standardisation of each feature, shape ``[features]``.
        weights, bias: Coefficients of the logits of the buckets seen in training,
            ``[features, classes]`` and ``[classes]``.
        buckets: Numbers of those buckets, ascending, ``[classes]``.
        means: Mean length in tokens of training's answers in each bucket, ``[classes]``.
    """

    centre: Floats
    scale: Floats
    weights: Floats
    bias: Floats
    buckets: NDArray[np.int64]
    means: NDArray[np.float64]

    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        logits = (features - self.centre) / self.scale @ self.weights + self.bias
        odds = np.exp(logits - logits.max())
        shares = odds / odds.sum()
        low, median, high = self._quantiles(shares, (0.05, 0.5, 0.95))
        likeliest = int(self.buckets[shares.argmax()])
        mean = float(shares @ self._means_up_to(most))
        return Guess(mean, low, high, min(most, median), likeliest)

    def _means_up_to(self, most: float) -> NDArray[np.float64]:
        """Mean length in each bucket, given ``most`` tokens; lengths are uniform in a bucket."""
        lower, upper = EDGES[self.buckets], EDGES[self.buckets + 1]
        cut = np.clip(most, lower, upper)
        means = np.where(cut < upper, cut - (cut - lower) ** 2 / (2 * (upper - lower)), self.means)
        bounded: NDArray[np.float64] = np.minimum(most, means)
        return bounded

    def _quantiles(self, shares: Floats, levels: tuple[float, ...]) -> list[float]:
        """Quantiles of the length, taken to be uniform within each bucket."""
        reached = np.concatenate(([0.0], np.cumsum(shares)))
        lower, upper = EDGES[self.buckets], EDGES[self.buckets + 1]
        found = []
        for level in levels:
            at = min(int(np.searchsorted(reached, level, side="right")) - 1, len(shares) - 1)
            inside = min(1.0, (level - reached[at]) / max(float(shares[at]), 1e-9))
            found.append(float(lower[at] + inside * (upper[at] - lower[at])))
        return found

    def arrays(self) -> Arrays:
        return vars(self)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        return cls(**arrays)
