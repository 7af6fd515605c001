"""How long KV takes between an engine and host memory: AdaptiveLLM's swap cost (equation 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loomserve.platform.costs.correction import Correction

TimedTransfer = tuple[int, float]
"""Bytes, and the seconds that they took."""

# Between the host's own memory and a GPU behind PCIe 4; the first transfers correct it.
_FIRST_GUESS = 5e9


class TransferTimes:
    """Predicts transfers out of an engine (D2H) and into it (H2D), corrected by those seen.

    Each takes a latency, whatever its size, and then ``bytes_per_s``.
    """

    def __init__(
        self,
        out_bytes_per_s: float,
        in_bytes_per_s: float,
        out_latency_s: float = 0.0,
        in_latency_s: float = 0.0,
        *,
        trusted: bool = True,
    ) -> None:
        self._out = _Direction(out_bytes_per_s, out_latency_s, trusted)
        self._in = _Direction(in_bytes_per_s, in_latency_s, trusted)

    @classmethod
    def unprofiled(cls) -> TransferTimes:
        """Guesses until the first transfers have been seen."""
        return cls(_FIRST_GUESS, _FIRST_GUESS, trusted=False)

    def out_s(self, size: int) -> float:
        """Predicted time of so many bytes from the engine to host memory."""
        return self._out.seconds(size)

    def in_s(self, size: int) -> float:
        """Predicted time of so many bytes from host memory to the engine."""
        return self._in.seconds(size)

    def observe_out(self, size: int, seconds: float) -> None:
        """Learn from a transfer that took so long; both above 0."""
        self._out.observe(size, seconds)

    def observe_in(self, size: int, seconds: float) -> None:
        """Learn from a transfer that took so long; both above 0."""
        self._in.observe(size, seconds)

    @property
    def out_error(self) -> float:
        """Mean absolute percentage error of the latest predictions, as a share, 0 at first."""
        return self._out.correction.error

    @property
    def in_error(self) -> float:
        """Mean absolute percentage error of the latest predictions, as a share, 0 at first."""
        return self._in.correction.error


def fit(transfers: Sequence[TimedTransfer]) -> tuple[float, float]:
    """Bytes a second and latency in seconds by least squares of the relative error."""
    measured = np.array(transfers, dtype=np.float64)
    rows = np.column_stack([measured[:, 0], np.ones(len(measured))]) / measured[:, 1:]
    (slope, latency), *_ = np.linalg.lstsq(rows, np.ones(len(measured)))
    if latency < 0 or slope <= 0:
        # Too few or too alike to tell them apart.
        slope, latency = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), 0.0
    return float(1 / slope), float(latency)


class _Direction:
    def __init__(self, bytes_per_s: float, latency_s: float, trusted: bool) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.correction = Correction(trusted=trusted)

    def seconds(self, size: int) -> float:
        return self.correction.factor * self._uncorrected(size)

    def observe(self, size: int, seconds: float) -> None:
        self.correction.score(self.seconds(size), seconds)
        self.correction.observe(self._uncorrected(size), seconds)

    def _uncorrected(self, size: int) -> float:
        return self._latency_s + size / self._bytes_per_s
