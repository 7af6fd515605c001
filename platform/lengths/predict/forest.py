"""A random forest whose leaves know how their lengths spread: Magnus's regressor, and Meinshausen,
"Quantile Regression Forests" (2006)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.lengths.predict.buckets import bucket_of
from loomserve.platform.lengths.predict.embedding import Floats
from loomserve.platform.lengths.predict.head import Arrays, Guess

SHARES = tuple((2 * n + 1) / 16 for n in range(8))
"""At which a leaf's quantiles stand for all of its lengths."""


@dataclass(frozen=True, eq=False)
class Forest:
    """All trees' nodes in one table, so that one row goes down all trees at once.

    Attributes:
        roots: Each tree's first node, shape ``[trees]``.
        feature: What a node compares, ``[nodes]``.
        threshold: With what: up to it goes left, ``[nodes]``.
        children: Left and right node, ``[nodes, 2]``; a leaf is its own child.
        means: Of a leaf's lengths in tokens, ``[nodes]``.
        quantiles: Of them, at :data:`SHARES`, ``[nodes, shares]``.
        depth: Of the deepest tree, shape ``[]``.
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    children: NDArray[np.int32]
    means: NDArray[np.float32]
    quantiles: NDArray[np.float32]
    depth: NDArray[np.int32]

    def leaves(self, features: Floats) -> NDArray[np.int32]:
        """The leaf of each tree, shape ``[trees]``."""
        node = self.roots
        for _ in range(int(self.depth)):
            right = features[self.feature[node]] > self.threshold[node]
            node = self.children[node, right.view(np.int8)]
        return node

    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        leaves = self.leaves(features)
        # Each leaf's lengths count for its tree alike, however many there are.
        pool = np.sort(self.quantiles[leaves], axis=None)
        # The quantiles leave out the tail, which the means hold.
        lengths = np.minimum(pool, most) if most < pool[-1] else self.means[leaves]
        tokens = float(lengths.mean())
        low, high = float(pool[int(0.05 * len(pool))]), float(pool[int(0.95 * len(pool))])
        return Guess(tokens, low, high, int(bucket_of(tokens)))

    def arrays(self) -> Arrays:
        return vars(self)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        return cls(**arrays)
