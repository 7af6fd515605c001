"""Tables of made-up reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from loomserve.routers.in_flight import InFlight
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable

RoutingPolicy = Literal["load_aware", "round_robin", "power_of_two", "prefix_aware"]
"""The platform's own."""


def reported(ledger: InFlight, reports: Mapping[str, RoutingStats | None]) -> ReplicaTable:
    """A table of the replicas that sent these reports; None: it has sent none."""
    table = ReplicaTable(ledger, stale_after_s=10.0)
    table.set_replicas(reports)
    for replica_id, report in reports.items():
        if report is not None:
            table.report(replica_id, report)
    return table
