"""How much a lender's own steps take longer because it serves guests within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

_STEPS = 128
_ANSWER = 32
"""Tokens of a short answer. The time per output token is the mean over an answer, which one slow
step in it does not make slow."""


class LenderStepTimes(NamedTuple):
    """Seconds for each output token of recent answers, p99: as they were, and without guests."""

    disturbed_s: float
    undisturbed_s: float


IDLE = LenderStepTimes(1.0, 1.0)
"""Of a lender without requests: guests disturb nobody."""


class ServedTime:
    """What guests' tasks took of the lender's recent steps.

    A step's own time is what it took without the tasks served within it, since these are all that a
    guest adds to it: the lender looks for tasks in less than a microsecond.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def add(self, step_s: float, served_s: float) -> None:
        """A step of so many seconds, so many of which were guests'."""
        self._steps.append((step_s, max(0.0, step_s - served_s)))

    def p99(self) -> LenderStepTimes | None:
        """None until there are enough steps to tell."""
        if len(self._steps) < _STEPS // 2:
            return None
        disturbed_s, own_s = zip(*self._steps, strict=True)
        return LenderStepTimes(_slowest_answer(disturbed_s), _slowest_answer(own_s))


def _slowest_answer(steps_s: Iterable[float]) -> float:
    """p99 of the means of consecutive steps, as many as an answer has tokens."""
    ends = list(accumulate(steps_s, initial=0.0))
    means = sorted(
        (end - begin) / _ANSWER for begin, end in zip(ends, ends[_ANSWER:], strict=False)
    )
    return means[-(-99 * len(means) // 100) - 1]
