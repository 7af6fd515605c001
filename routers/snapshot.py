"""The snapshot of a replica: its engine's last report joined with this process's ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loomserve.platform.state import ReplicaLoad
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import InFlight


def snapshot(replica_id: str, stats: Mapping[str, Any], ledger: InFlight) -> Replica:
    """Join what a replica's ``record_routing_stats`` returned with what is open on it.

    Args:
        stats: ``{"load": ReplicaLoad's fields or None, "max_running": int,
            "kv_capacity_tokens": int or None, "draining": bool}``; empty before the first report.
    """
    assigned = ledger.of(replica_id)
    if not stats:
        return Replica(replica_id, assigned=assigned)
    load = None if stats["load"] is None else ReplicaLoad.model_validate(stats["load"])
    return Replica(
        id=replica_id,
        load=load,
        max_running=stats["max_running"],
        kv_capacity_tokens=stats["kv_capacity_tokens"],
        draining=stats["draining"],
        assigned=assigned,
        assigned_when_measured=assigned
        if load is None
        else ledger.of(replica_id, load.measured_at),
    )
