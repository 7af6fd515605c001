"""The requests of a process that wait at engines, as the engines' queues see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

from loomserve.platform.config.scheduling import QueueName
from loomserve.platform.scheduling.policy.ahead import share_ahead
from loomserve.platform.scheduling.policy.queue import QUEUES, QueuedRequest


class WaitingRequests:
    """A model's requests that were sent to replicas, until their answers begin.

    Other processes' requests wait there too, of which only the number is known. They are taken to
    be like these: gateways share a model's requests among them.
    """

    def __init__(self) -> None:
        self._priority, self._heeds_deadlines = QUEUES["fcfs"], True
        self._by_replica: defaultdict[
            str, dict[Hashable, tuple[QueuedRequest, Callable[[], bool]]]
        ] = defaultdict(dict)

    def order_by(self, queue: QueueName, *, deadlines: bool) -> None:
        """Set the order in which engines serve; ``deadlines``: whether they heed them."""
        self._priority, self._heeds_deadlines = QUEUES[queue], deadlines

    def came(
        self, key: Hashable, replica_id: str, request: QueuedRequest, began: Callable[[], bool]
    ) -> None:
        """Note a request until :meth:`left`; ``began`` tells whether its answer has begun."""
        self._by_replica[replica_id][key] = request, began

    def left(self, key: Hashable, replica_id: str) -> None:
        """Forget a request, which may be forgotten already."""
        there = self._by_replica.get(replica_id)
        if there is not None:
            there.pop(key, None)
            if not there:
                del self._by_replica[replica_id]

    def share_ahead(self, request: QueuedRequest, replica_id: str, now: float) -> float:
        """The share of what waits at the replica that it serves before ``request``, 0 to 1."""
        there = self._by_replica.get(replica_id, {})
        for key in [key for key, (_, began) in there.items() if began()]:
            self.left(key, replica_id)
        waiting = [self._seen(each) for each, _ in there.values()]
        return share_ahead(self._seen(request), waiting, self._priority, now)

    def _seen(self, request: QueuedRequest) -> QueuedRequest:
        return request if self._heeds_deadlines else request._replace(deadline_s=None)
