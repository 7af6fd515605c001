"""The snapshot of a replica: its engine's last report joined with this process's ledger."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import InFlight


class RoutingStats(BaseModel):
    """A replica's report to those that route requests."""

    model_config = ConfigDict(frozen=True)

    load: ReplicaLoad | None
    max_running: int
    kv_capacity_tokens: int | None
    draining: bool
    role: Role


def snapshot(replica_id: str, stats: RoutingStats | None, ledger: InFlight) -> Replica:
    """Join a replica's last report (None: it has sent none) with the requests open on it here."""
    assigned = ledger.of(replica_id)
    if stats is None:
        return Replica(replica_id, assigned=assigned)
    load = stats.load
    return Replica(
        id=replica_id,
        load=load,
        max_running=stats.max_running,
        kv_capacity_tokens=stats.kv_capacity_tokens,
        draining=stats.draining,
        role=stats.role,
        assigned=assigned,
        assigned_when_measured=assigned
        if load is None
        else ledger.of(replica_id, load.measured_at),
    )
