"""A random forest with quantiles in its leaves: Magnus's regressor, and Meinshausen, "Quantile
Regression Forests" (2006)."""

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
"""Levels of the quantiles that stand for all lengths of a leaf."""


@dataclass(frozen=True, eq=False)
class Forest:
    """Random forest as one table of all trees' nodes, so that a row goes down all trees at once.

    Attributes:
        roots: Each tree's first node, shape ``[trees]``.
        feature: Number of the feature that a node compares, ``[nodes]``.
        threshold: Greatest value of the feature that goes left, ``[nodes]``.
        children: Left and right child of a node, ``[nodes, 2]``; a leaf is its own child.
        means: Mean of a leaf's lengths in tokens, ``[nodes]``.
        quantiles: Quantiles of a leaf's lengths at :data:`SHARES`, ``[nodes, shares]``.
        depth: Depth of the deepest tree, shape ``[]``.
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
        # Every leaf counts the same, however many lengths it has.
        pool = np.sort(self.quantiles[leaves], axis=None)
        # The means include the tail, which the quantiles leave out.
        lengths = np.minimum(pool, most) if most < pool[-1] else self.means[leaves]
        tokens = float(lengths.mean())
        low, median, high = (float(pool[int(share * len(pool))]) for share in (0.05, 0.5, 0.95))
        return Guess(tokens, low, high, min(most, median), int(bucket_of(tokens)))

    def arrays(self) -> Arrays:
        return vars(self)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        return cls(**arrays)
