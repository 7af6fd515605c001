"""Time of KV transfers between an engine and host memory: AdaptiveLLM's swap cost (equation 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loomserve.platform.costs.correction import Correction

TimedTransfer = tuple[int, float]
"""Bytes, and the seconds that they took."""

# Between a copy within host memory and one over PCIe 4; the first transfers correct it.
_FIRST_GUESS = 5e9


class Direction:
    """Predictor of transfers in one direction, corrected by observations. A transfer takes a
    latency, whatever its size, and then its bytes at ``bytes_per_s``."""

    def __init__(self, bytes_per_s: float, latency_s: float, *, trusted: bool) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.correction = Correction(trusted=trusted)

    def seconds(self, size: int) -> float:
        """Predicted seconds of ``size`` bytes."""
        return self.correction.factor * self._uncorrected(size)

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a transfer; both arguments are above 0."""
        self.correction.score(self.seconds(size), seconds)
        self.correction.observe(self._uncorrected(size), seconds)

    def _uncorrected(self, size: int) -> float:
        return self._latency_s + size / self._bytes_per_s


class TransferTimes:
    """Predictors of transfers ``out`` of an engine (D2H) and ``into`` it (H2D)."""

    def __init__(
        self,
        out_bytes_per_s: float,
        in_bytes_per_s: float,
        out_latency_s: float = 0.0,
        in_latency_s: float = 0.0,
        *,
        trusted: bool = True,
    ) -> None:
        self.out = Direction(out_bytes_per_s, out_latency_s, trusted=trusted)
        self.into = Direction(in_bytes_per_s, in_latency_s, trusted=trusted)

    @classmethod
    def unprofiled(cls) -> TransferTimes:
        """A predictor that guesses until the first transfers have been observed."""
        return cls(_FIRST_GUESS, _FIRST_GUESS, trusted=False)

    @property
    def error(self) -> float:
        """The larger :attr:`Correction.error` of the two directions."""
        return max(self.out.correction.error, self.into.correction.error)


def fit(transfers: Sequence[TimedTransfer]) -> tuple[float, float]:
    """Fit bytes a second and latency (seconds) by least squares of the relative error."""
    measured = np.array(transfers, dtype=np.float64)
    rows = np.column_stack([measured[:, 0], np.ones(len(measured))]) / measured[:, 1:]
    (slope, latency), *_ = np.linalg.lstsq(rows, np.ones(len(measured)))
    if latency < 0 or slope <= 0:
        # The transfers are too few or too alike to tell the two apart.
        slope, latency = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), 0.0
    return float(1 / slope), float(latency)
