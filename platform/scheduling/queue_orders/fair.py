"""Time since a request's arrival for each of its tokens: AdaptiveLLM, section 3.5."""

from __future__ import annotations

from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy

# The last moments before a deadline count no more than this.
_GREATEST_URGENCY = 100.0


class Fair(QueuePolicy):
    """A short request rises quickly and a long one steadily, so that none waits for ever.

    Where its length is predicted, that is the highest response ratio next (Brinch Hansen, 1971). A
    deadline raises the priority as it nears, by the whole time over what is left of it; one that is
    missed no longer does (the paper's future work, section 6).
    """

    def priority(self, request: QueuedRequest, now: float) -> float:
        return max(0.0, now - request.arrived_s) / request.tokens * _urgency(request, now)


def _urgency(request: QueuedRequest, now: float) -> float:
    if request.deadline_s is None or request.deadline_s <= now:
        return 1.0
    whole, left = request.deadline_s - request.arrived_s, request.deadline_s - now
    return min(_GREATEST_URGENCY, max(1.0, whole / left))
