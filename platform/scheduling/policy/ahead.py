"""What is served before a request that is about to come to an engine's queue."""

from __future__ import annotations

from collections.abc import Collection

from loomserve.platform.scheduling.policy.queue import Priority, QueuedRequest


def share_ahead(
    request: QueuedRequest, waiting: Collection[QueuedRequest], priority: Priority, now: float
) -> float:
    """The share of ``waiting`` that is served before ``request``, by the engine's own order.

    Of two that are alike the one that came first is served first. 1 if nothing is known to wait.
    """
    if not waiting:
        return 1.0
    own = _rank(request, priority, now)
    return sum(_rank(each, priority, now) < own for each in waiting) / len(waiting)


def _rank(request: QueuedRequest, priority: Priority, now: float) -> tuple[bool, float, float]:
    return request.background, -priority(request, now), request.arrived_s
