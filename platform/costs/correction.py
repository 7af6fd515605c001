"""How far predictions are from what was measured, and by what factor they are put right."""

from __future__ import annotations

import math

# Weight of the newest ratio: a machine's speed drifts from one step to the next few.
_GAIN = 0.2
# A stalled step or transfer counts as no more than this logarithm off, however long it took.
_BOUND = 0.3
# Weight of the newest error: about the last two hundred count.
_NEWEST = 0.01


class Correction:
    """The factor between predicted and measured seconds: the moving geometric mean of the latest.

    With ``trusted``, predictions count as right until several measurements in a row say otherwise;
    without, the first few measurements are believed as they are.
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
        """Take in a prediction from before correction; seconds, both above 0."""
        off = math.log(measured / predicted) - self._logarithm
        self._measurements += 1
        gain = 1 / self._measurements
        if gain < _GAIN:
            gain, off = _GAIN, max(-_BOUND, min(_BOUND, off))
        self._logarithm += gain * off

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
