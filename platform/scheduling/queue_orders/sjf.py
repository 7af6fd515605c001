"""Shortest remaining job first, as predicted. Long ones wait while short ones come."""

from __future__ import annotations

from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy


class Sjf(QueuePolicy):
    def priority(self, request: QueuedRequest, now: float) -> float:
        return -float(request.left)
