"""How far predictions are from what was measured, and by what factor they are put right."""

from __future__ import annotations

import statistics
from collections import deque

# Weight of the newest error: about the last two hundred count.
_NEWEST = 0.01


class Correction:
    """The factor between predicted and measured seconds: the median of the latest ratios.

    A median, as a stalled step or transfer must not count however long it took, while a machine
    that got slower for good is followed after half of ``window``. With ``trusted``, the
    predictions count as right until half of ``window`` says otherwise; without, the first
    measurement is believed.
    """

    def __init__(self, window: int, *, trusted: bool) -> None:
        self._ratios = deque([1.0] * window if trusted else [], maxlen=window)
        self.factor = 1.0
        self._error = 0.0
        self._weight = 0.0

    def observe(self, predicted: float, measured: float) -> None:
        """Take in a prediction from before correction; seconds, both above 0."""
        self._ratios.append(measured / predicted)
        self.factor = statistics.median(self._ratios)

    def score(self, predicted: float, measured: float) -> None:
        """Count how far a corrected prediction was from what was then measured."""
        off = abs(predicted - measured) / measured
        self._error += _NEWEST * (off - self._error)
        self._weight += _NEWEST * (1.0 - self._weight)

    @property
    def error(self) -> float:
        """Mean absolute error of the latest predictions as a share of what was measured, or 0."""
        # The weights of few errors do not add up to one yet.
        return self._error / self._weight if self._weight else 0.0
