"""How much a lender's own steps take longer because it serves guests within them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_STEPS = 128
"""Of which the 99th percentile is taken: the slowest but one."""


class StepTimes(NamedTuple):
    """p99 of recent steps that generated tokens, in seconds: as they were, and without guests."""

    disturbed_s: float
    undisturbed_s: float


class GuestTime:
    """What guests' tasks took of the lender's recent steps.

    A step's own time is what it took without the tasks served within it, since these are all that a
    guest adds to it: the lender looks for tasks in less than a microsecond.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def add(self, step_s: float, served_s: float) -> None:
        """A step of so many seconds, so many of which were guests'."""
        self._steps.append((step_s, max(0.0, step_s - served_s)))

    def p99(self) -> StepTimes | None:
        """None until there are enough steps to tell."""
        if len(self._steps) < _STEPS // 2:
            return None
        at = -(-99 * len(self._steps) // 100) - 1
        disturbed, own = (sorted(column)[at] for column in zip(*self._steps, strict=True))
        return StepTimes(disturbed, own)
