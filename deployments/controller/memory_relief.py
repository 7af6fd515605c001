"""Has one replica after the other give its memory back where a node's runs short."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from loomserve.deployments.controller.presence_mover import PresenceMover
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.base.periodic import every
from loomserve.platform.devices.shortage import threshold
from loomserve.platform.elastic.policy.shortage import gives_back, may_go
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.state import Presence

_log = logging.getLogger("ray.serve")

_LOOK_S = 0.5
# A node must have said so in two heartbeats: a short peak ends nothing.
_SHORT_S = 2.0
# Until then a replica has ended, and later heartbeats say whether that was enough.
_SETTLE_S = 15.0


class MemoryRelief:
    """Looks at what replicas say of their nodes' memory. One at a time gives its own back, and the
    next one only if memory is short some time after."""

    def __init__(
        self, fleet: Fleet, mover: PresenceMover, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet, self._mover, self._clock = fleet, mover, clock
        self._short_since: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        await every(_LOOK_S, self._look, failed=_log.exception)

    def check(self) -> None:
        """Raise Unavailable if a node's memory is short, so that no model may be loaded."""
        for node, live in self._by_node().items():
            if _used(live) > threshold():
                raise Unavailable(
                    f"{_memory_of(node)} is short ({_used(live):.0%} are used): unload a model, "
                    "or try again when it is not",
                    reason="memory_short",
                    retry_after_s=_SETTLE_S,
                )

    async def _look(self) -> None:
        now = self._clock()
        by_node = self._by_node()
        live = {each.id for replicas in by_node.values() for each in replicas}
        for gone in self._fleet.gives_back.keys() - live:
            del self._fleet.gives_back[gone]
        for node, replicas in by_node.items():
            if _used(replicas) <= threshold():
                self._short_since.pop(node, None)
                continue
            since = self._short_since.setdefault(node, now)
            if now - since > _SHORT_S and now >= self._not_before.get(node, 0.0):
                self._relieve(node, replicas, now)

    def _relieve(self, node: str, replicas: list[ReplicaRecord], now: float) -> None:
        chosen = gives_back(
            (model, each)
            for model in self._fleet.registry.snapshot(now).models
            for each in model.replicas
            if each.node == node and not each.stops and each.id not in self._fleet.gives_back
        )
        if chosen is None:
            return
        model, replica = chosen
        self._not_before[node] = now + _SETTLE_S
        why = (
            f"{_memory_of(node)} is short: {_used(replicas):.0%} are used, and "
            f"{threshold():.0%} may be"
        )
        _log.error("replica %s gives its memory back: %s", replica.id, why)
        if may_go(model):
            self._mover.begin(model.name, Presence.UNLOADED, why)
        else:
            self._fleet.gives_back[replica.id] = why
            self._mover.note(model.name, Presence.READY, f"replica {replica.id} ends: {why}")

    def _by_node(self) -> Mapping[str, list[ReplicaRecord]]:
        found: defaultdict[str, list[ReplicaRecord]] = defaultdict(list)
        for each in self._fleet.registry.snapshot(self._clock()).replicas:
            found[each.node].append(each)
        return found


def _memory_of(node: str) -> str:
    return "this machine's memory" if is_loopback(node) else f"the memory of {node}"


def _used(replicas: list[ReplicaRecord]) -> float:
    """The newest report of their node."""
    return max(replicas, key=lambda each: each.seen_at).heartbeat.memory_used
