"""Correction of predictions by a factor, from the measured times that followed them."""

from __future__ import annotations

import math

# Weight of the newest ratio: a machine's speed drifts within a few steps.
_GAIN = 0.2
# Bound of a ratio's logarithm, so that a stalled step or transfer does not count in full.
_BOUND = 0.3
# Weight of the newest error: about the last two hundred count.
_NEWEST = 0.01


class Correction:
    """Moving geometric mean of the ratio of measured to predicted seconds.

    ``trusted``: predictions count as right until several measurements in a row contradict them.
    Otherwise the first few measurements count in full.
    """

    def __init__(self, *, trusted: bool) -> None:
        self._logarithm = 0.0
        self._measurements = math.inf if trusted else 0
        self._error = 0.0
        self._weight = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._logarithm)

    def observe(self, predicted: float, measured: float) -> None:
        """Take in an uncorrected prediction and the measured seconds, both above 0."""
        off = math.log(measured / predicted) - self._logarithm
        self._measurements += 1
        gain = 1 / self._measurements
        if gain < _GAIN:
            gain, off = _GAIN, max(-_BOUND, min(_BOUND, off))
        self._logarithm += gain * off

    def score(self, predicted: float, measured: float) -> None:
        off = abs(predicted - measured) / measured
        self._error += _NEWEST * (off - self._error)
        self._weight += _NEWEST * (1.0 - self._weight)

    @property
    def error(self) -> float:
        """Mean absolute error of the latest predictions, a share of measured time; 0 at first."""
        # The weights of few errors do not add up to one yet.
        return self._error / self._weight if self._weight else 0.0
