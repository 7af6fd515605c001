"""How long a static batch takes: Magnus's estimator, nearest neighbours of what was seen.

Batches of like size, length and generation take as many iterations of like cost, so that the mean
of the most similar ones is a prediction. It goes on learning: every two minutes those batches that
it would have predicted badly are added to what it knows.
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
    """β, L(B) in tokens, and G(B) in tokens: as predicted before a batch, as it was after it."""

    size: int
    length: int
    generation: int


TimedBatch = tuple[BatchShape, float]
"""A batch as it was, and the seconds that it took."""


@dataclass(frozen=True, slots=True)
class Learning:
    """When the estimator learns, and from what; the defaults are Magnus's.

    Attributes:
        every_s: So often finished batches are looked at.
        error_s: A batch is learnt if its prediction was off by more than this
        error_share: and by more than this share of the time that it took.
    """

    every_s: float = 120.0
    error_s: float = 2.0
    error_share: float = 0.2


_MAGNUS = Learning()


class BatchTimes:
    """Predicts the batches of one engine; time comes in with each call, in seconds of one clock."""

    def __init__(
        self,
        samples: Sequence[TimedBatch],
        now: float,
        neighbours: int = 3,
        learning: Learning = _MAGNUS,
    ) -> None:
        """``samples`` were measured beforehand.

        Raises:
            ValueError: there is no sample, or ``neighbours`` is below 1.
        """
        if not samples or neighbours < 1:
            raise ValueError("give at least one measured batch and one neighbour to predict from")
        self._samples = list(samples)
        self._neighbours = neighbours
        self._learning = learning
        self._looked_s = now
        self._finished: list[TimedBatch] = []
        self._fit()

    @property
    def samples(self) -> int:
        """How many batches it knows."""
        return len(self._samples)

    def seconds(self, shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
        """Predicted time of each, ``[shapes]``, in a millisecond for all."""
        if not shapes:
            return np.empty(0)
        return np.asarray(self._knn.predict(_rows(shapes)), dtype=np.float64)

    def finished(self, shape: BatchShape, seconds: float, now: float) -> None:
        """A batch ended whose answers' real lengths are in ``shape``; learns when it is time to."""
        self._finished.append((shape, seconds))
        if now - self._looked_s >= self._learning.every_s:
            self._learn()
            self._looked_s = now

    def _learn(self) -> None:
        """Predict what has finished with its real lengths, and add what was predicted badly."""
        predicted = self.seconds([shape for shape, _ in self._finished])
        wrong = [
            batch
            for batch, guess in zip(self._finished, predicted, strict=True)
            if abs(guess - batch[1])
            > max(self._learning.error_s, self._learning.error_share * batch[1])
        ]
        self._finished.clear()
        if wrong:
            self._samples += wrong
            self._fit()

    def _fit(self) -> None:
        # Tokens and requests are far apart in size, and to be alike must mean the same in each.
        neighbours = min(self._neighbours, len(self._samples))
        self._knn = make_pipeline(
            StandardScaler(), KNeighborsRegressor(neighbours, weights="distance")
        )
        self._knn.fit(
            _rows([shape for shape, _ in self._samples]),
            [seconds for _, seconds in self._samples],
        )


def _rows(shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
    return np.array([astuple(shape) for shape in shapes], dtype=np.float64)
