"""The order in which an engine serves its requests: pure priorities, chosen by name.

A policy maps a :class:`QueuedRequest` and the time to a priority; the greatest is served first and
preempted last. All times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

# Seconds to the assumed deadline of a request that names none: it must not wait for ever.
_PATIENCE_S = 600.0
# The last moments before a deadline count no more than this.
_GREATEST_URGENCY = 100.0


class QueuedRequest(NamedTuple):
    """A request as its queue sees it, waiting or running.

    Attributes:
        arrived_s: When it entered the queue for the first time.
        tokens: Prompt tokens and predicted answer tokens; without a prediction, those that it has
            generated. At least 1.
        left: Tokens still to be computed until it ends; without a prediction, the most that it may
            generate are assumed.
        left_s: Predicted time until it ends, once it runs; 0 where nothing predicts its length.
        deadline_s: When its client wants to have the whole answer, if it said so.
        background: It comes after all requests that are not, whatever their priorities.
    """

    arrived_s: float
    tokens: int
    left: int
    left_s: float = 0.0
    deadline_s: float | None = None
    background: bool = False


Priority = Callable[[QueuedRequest, float], float]


def fair(request: QueuedRequest, now: float) -> float:
    """Time since its arrival for each token: AdaptiveLLM, section 3.5.

    A short request rises quickly and a long one steadily, so that none waits for ever. Where its
    length is predicted, that is the highest response ratio next (Brinch Hansen, 1971). A deadline
    raises the priority as it nears, by the whole time over what is left of it; one that is missed
    no longer does (the paper's future work, section 6).
    """
    return max(0.0, now - request.arrived_s) / request.tokens * _urgency(request, now)


def fcfs(request: QueuedRequest, now: float) -> float:
    """First come, first served."""
    return -request.arrived_s


def deadline(request: QueuedRequest, now: float) -> float:
    """Least slack first: deadline - now - predicted time to finish.

    Without predictions that is the earliest deadline. One that can no longer be met counts as one
    that was not set, so that what is hopeless does not make others late, too.
    """
    if request.deadline_s is not None and request.deadline_s - request.left_s > now:
        return request.left_s - request.deadline_s
    return -(request.arrived_s + _PATIENCE_S)


def sjf(request: QueuedRequest, now: float) -> float:
    """Shortest remaining job first, as predicted. Long ones wait while short ones come."""
    return -float(request.left)


QUEUES: Mapping[str, Priority] = {"fair": fair, "fcfs": fcfs, "deadline": deadline, "sjf": sjf}


def _urgency(request: QueuedRequest, now: float) -> float:
    if request.deadline_s is None or request.deadline_s <= now:
        return 1.0
    whole, left = request.deadline_s - request.arrived_s, request.deadline_s - now
    return min(_GREATEST_URGENCY, max(1.0, whole / left))
