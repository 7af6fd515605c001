"""First come, first served."""

from __future__ import annotations

from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy


class Fcfs(QueuePolicy):
    as_they_came = True

    def priority(self, request: QueuedRequest, now: float) -> float:
        return -request.arrived_s
