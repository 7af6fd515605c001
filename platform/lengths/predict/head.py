"""Heads turn a request's features into a guess, from plain arrays and without scikit-learn.

Importing scikit-learn takes seconds and memory, and its ``predict`` of one row milliseconds; only
training needs it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loomserve.platform.lengths.predict.embedding import Floats

EDGES = np.array([0, *(2**power for power in range(3, 12))], np.float64)
"""UELLM's buckets of output lengths in tokens: [0, 8), [8, 16), ... [1024, 2048) (equation 3-1)."""
BUCKETS = len(EDGES) - 1
Arrays = Mapping[str, NDArray[Any]]
SHARES = tuple((2 * n + 1) / 16 for n in range(8))
"""Levels of the quantiles that stand for all lengths of a leaf."""


def bucket_of(tokens: ArrayLike) -> NDArray[np.int64]:
    """The bucket of each length; lengths beyond the last bucket belong to it."""
    return np.clip(np.searchsorted(EDGES, tokens, side="right") - 1, 0, BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class Guess:
    """Output length of a request before calibration, in tokens. Mean and median are given the most
    tokens that the answer may have; ``low`` and ``high`` are the 5 % and 95 % quantiles if nothing
    bounds it. ``bucket`` is the likeliest."""

    tokens: float
    low: float
    high: float
    median: float
    bucket: int


class Head(ABC):
    """Fitted model that guesses a length from features; a dataclass of arrays."""

    @abstractmethod
    def guess(self, features: Floats, most: float = math.inf) -> Guess:
        """Guess the length of an answer that may have ``most`` tokens."""

    def arrays(self) -> Arrays:
        """The arrays from which :meth:`of` makes an equal head."""
        return vars(self)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        return cls(**arrays)


@dataclass(frozen=True, eq=False)
class Forest(Head):
    """Random forest with quantiles in its leaves: Magnus's regressor, and Meinshausen, "Quantile
    Regression Forests" (2006). All trees' nodes are one table, so a row goes down all at once.

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


@dataclass(frozen=True, eq=False)
class BucketClassifier(Head):
    """Classifier of buckets on an embedding: UELLM (section 3.3.1) and S3.

    It is a multinomial logistic regression on standardised features.

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


@dataclass(frozen=True, eq=False)
class AppMeans(Head):
    """Table of lengths by application: the baseline that sees only which application asks.

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
