"""How much longer a lender's own steps take because it serves borrowers within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

_STEPS = 128
_ANSWER = 32
"""Tokens of a short answer. The time per output token is the mean over an answer, so one slow step
does not make an answer slow."""


class LenderStepTimes(NamedTuple):
    """p99 of recent answers' seconds per output token: measured, and without borrowers' tasks."""

    disturbed_s: float
    undisturbed_s: float


IDLE = LenderStepTimes(1.0, 1.0)
"""The times of a lender without requests, which borrowers cannot disturb."""


class ServedTime:
    """The lender's recent steps, each with the time that borrowers' tasks took of it. A step
    without borrowers would take its time less that of the tasks served within it, since looking for
    tasks takes less than a microsecond."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def add(self, step_s: float, served_s: float) -> None:
        """Add a step of ``step_s`` seconds, ``served_s`` of which went to borrowers' tasks."""
        self._steps.append((step_s, max(0.0, step_s - served_s)))

    def p99(self) -> LenderStepTimes | None:
        """Return the p99 of both; None until there are enough steps to tell."""
        if len(self._steps) < _STEPS // 2:
            return None
        disturbed_s, own_s = zip(*self._steps, strict=True)
        return LenderStepTimes(_slowest_answer(disturbed_s), _slowest_answer(own_s))


def _slowest_answer(steps_s: Iterable[float]) -> float:
    """Return the p99 of the means over runs of steps, each as long as a short answer."""
    ends = list(accumulate(steps_s, initial=0.0))
    means = sorted(
        (end - begin) / _ANSWER for begin, end in zip(ends, ends[_ANSWER:], strict=False)
    )
    return means[-(-99 * len(means) // 100) - 1]
