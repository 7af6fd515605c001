"""Which replica of a node gives its memory back when that runs short."""

from __future__ import annotations

from collections.abc import Iterable

from loomserve.platform.fleet.snapshot import FleetModel, ReplicaRecord

Holder = tuple[FleetModel, ReplicaRecord]
"""A live replica of a node whose memory is short, with its model's replicas on all nodes."""


def gives_back(holders: Iterable[Holder]) -> Holder | None:
    """The one whose end costs least; None: there is none. First idle ones of models that come again
    when they are asked for; then those of whose model there is another, idle before busy; the last
    of its model after those, and if it has requests, after all. Among equals the largest."""
    return min(holders, key=lambda each: _cost(*each), default=None)


def may_go(model: FleetModel) -> bool:
    """Whether nobody misses the whole model, which comes again when it is asked for."""
    return model.record.on_demand and not model.record.model.pinned and not model.has_requests


def _cost(model: FleetModel, replica: ReplicaRecord) -> tuple[int, int, str]:
    busy = replica.heartbeat.in_flight > 0
    # Its requests could go on with them.
    others = any(
        each.id != replica.id and not (each.stops or each.asleep) for each in model.replicas
    )
    if may_go(model):
        rank = 0
    elif others:
        rank = 2 if busy else 1
    else:
        rank = 4 if busy else 3
    size = replica.footprint.memory_bytes if replica.footprint is not None else 0
    return rank, -size, replica.id
