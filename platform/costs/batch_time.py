"""Time of a static batch: Magnus's estimator, nearest neighbours among measured batches.

Batches of similar size, length and generation take a similar number of iterations of similar cost,
so the mean of the most similar ones is a prediction. The estimator goes on learning: every two
minutes it adds the finished batches that it predicts badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


@dataclass(frozen=True, slots=True)
class BatchShape:
    """β requests, L(B) tokens of prompt and G(B) of answer: predicted before it, real after it."""

    size: int
    length: int
    generation: int


TimedBatch = tuple[BatchShape, float]
"""Real shape of a batch, and the seconds that it took."""


# Magnus's: seconds between looks at the finished batches, and the errors from which one is learnt.
_EVERY_S, _ERROR_S, _ERROR_SHARE = 120.0, 2.0, 0.2
_NEIGHBOURS = 3


class BatchTimes:
    """Predictor of the batches of one engine; ``now`` is in seconds of one clock."""

    def __init__(self, samples: Sequence[TimedBatch], now: float) -> None:
        """Begin with measured ``samples``; without any it raises ``ValueError``."""
        if not samples:
            raise ValueError("give at least one measured batch to predict from")
        self._samples = list(samples)
        self._looked_s = now
        self._finished: list[TimedBatch] = []
        self._fit()

    @property
    def samples(self) -> int:
        """Number of batches that it knows."""
        return len(self._samples)

    def seconds(self, shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
        """Predicted seconds of each batch, ``[shapes]``; all together in a millisecond."""
        if not shapes:
            return np.empty(0)
        return np.asarray(self._knn.predict(_rows(shapes)), dtype=np.float64)

    def finished(self, shape: BatchShape, seconds: float, now: float) -> None:
        """Take in a finished batch with its real lengths, and learn if it is time to."""
        self._finished.append((shape, seconds))
        if now - self._looked_s >= _EVERY_S:
            self._learn()
            self._looked_s = now

    def _learn(self) -> None:
        """Predict the finished batches from their real lengths, and add those predicted badly."""
        predicted = self.seconds([shape for shape, _ in self._finished])
        wrong = [
            batch
            for batch, guess in zip(self._finished, predicted, strict=True)
            if abs(guess - batch[1]) > max(_ERROR_S, _ERROR_SHARE * batch[1])
        ]
        self._finished.clear()
        if wrong:
            self._samples += wrong
            self._fit()

    def _fit(self) -> None:
        # Tokens and requests differ in scale, and must count alike in the distance.
        neighbours = min(_NEIGHBOURS, len(self._samples))
        self._knn = make_pipeline(
            StandardScaler(), KNeighborsRegressor(neighbours, weights="distance")
        )
        self._knn.fit(
            _rows([shape for shape, _ in self._samples]), [seconds for _, seconds in self._samples]
        )


def _rows(shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
    return np.array([astuple(shape) for shape in shapes], dtype=np.float64)
