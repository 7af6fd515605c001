"""Least slack first: deadline - now - predicted time to finish."""

from __future__ import annotations

from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy

# Seconds to the assumed deadline of a request that names none: it must not wait for ever.
_PATIENCE_S = 600.0


class Deadline(QueuePolicy):
    """Without predictions that is the earliest deadline. One that can no longer be met counts as
    one that was not set, so that what is hopeless does not make others late, too."""

    asks_left_s = True

    def priority(self, request: QueuedRequest, now: float) -> float:
        if request.deadline_s is not None and request.deadline_s - request.left_s > now:
            return request.left_s - request.deadline_s
        return -(request.arrived_s + _PATIENCE_S)
