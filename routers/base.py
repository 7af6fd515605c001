"""The input and output of routing policies: frozen snapshots in, a decision out.

A policy is filter → score → pick: :func:`loomserve.routers.decision.decide` filters, and a ``Pick``
scores and picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import NOTHING, Assigned


@dataclass(frozen=True)
class Replica:
    """One replica as its router sees it at one moment.

    The engine's report counts the requests of every gateway, but as of ``load.measured_at``; this
    process's ledger is exact and immediate, but knows only its own requests. So the estimate is
    the report plus what this process started, less what it finished, since the measurement.
    """

    id: str
    load: ReplicaLoad | None = None
    """The last report; None: there is none, or it is too old to count."""
    max_running: int = 1
    """Requests the engine runs at once (``max_num_seqs``); 1 until it has said."""
    kv_capacity_tokens: int | None = None
    """Tokens that its KV cache holds; None until it has said."""
    draining: bool = False
    role: Role = Role.UNIFIED
    assigned: Assigned = NOTHING
    """Requests that this process has open on it now."""
    assigned_when_measured: Assigned = NOTHING
    """Requests that this process had open on it at ``load.measured_at``."""

    @property
    def queue_length(self) -> int:
        """Requests running or waiting."""
        here = self.assigned.requests
        if self.load is None:
            return here
        since = here - self.assigned_when_measured.requests
        # Requests on the wire at the measurement are in neither term; what is open here is a floor.
        return max(here, self.load.running + self.load.waiting + since)

    @property
    def utilisation(self) -> float:
        """BanaServe's U = C/C_max + M/M_max (eq. 4-33), of requests and of KV cache.

        The paper's C is what the hardware does, hence U ≤ 2. Here C is demand: requests waiting
        beyond ``max_running`` raise U above 2, or a flooded replica would pass for a full one.
        """
        return self.queue_length / self.max_running + self._kv_share

    @property
    def _kv_share(self) -> float:
        measured = 0.0 if self.load is None else self.load.kv_cache_usage
        if self.kv_capacity_tokens is None:
            return measured
        tokens = self.assigned.tokens
        if self.load is not None:
            tokens -= self.assigned_when_measured.tokens
        return min(1.0, max(0.0, measured + tokens / self.kv_capacity_tokens))


@dataclass(frozen=True)
class Decision:
    replica_id: str
    reason: str
    """Label of ``loomserve_route_decisions_total``."""
    others: tuple[str, ...] = ()
    """Ids of the other replicas that may take the request; policies leave it empty."""


Pick = Callable[[Sequence[Replica]], Decision]
"""Chooses one of the candidates, at least one; their order matters only to random policies."""
