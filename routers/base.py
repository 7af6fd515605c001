"""What routing policies see and answer: frozen snapshots in, a decision out; neither Ray nor vLLM.

A policy is filter → score → pick: :func:`loomserve.routers.decision.decide` filters, and a ``Pick``
scores and picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import NOTHING, Assigned, Booking


@dataclass(frozen=True)
class RoutingPayload:
    """What the gateway tells a request router about a request.

    It is the first argument of ``handle.choose_replica(payload, _reserve=False)``. There is one
    field for text and messages, for Ray's prefix-aware router takes an attribute named
    ``messages`` before ``prompt`` even if it is None, and accepts either kind under either name.
    """

    booking: Booking = field(compare=False)
    prompt: str | list[Any] = ""
    """The prompt's text, or the list of chat messages as the client sent them."""
    prompt_tokens: int = 0
    """Estimate of the prompt's length."""
    output_tokens: int = 0
    """The tokens that the request is expected to generate; the most it may, if nobody predicts."""
    exclude: frozenset[str] = frozenset()
    """Ids of replicas that just failed this request."""
    pinned_to: str | None = None
    """Id of the only replica that may take it; None: any may."""
    chosen: list[Replica] = field(default_factory=list, compare=False)
    """The router appends what it knew of the replica that it chose, without this request."""

    @property
    def tokens(self) -> int:
        """KV cache the request is expected to come to need, in tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Replica:
    """One replica as its router sees it at one moment.

    The engine's report counts the requests of every gateway, but as of ``load.measured_at``; this
    process's ledger is exact and immediate, but knows only its own requests. So the estimate is
    the report plus what this process started, less what it finished, since the measurement.
    """

    id: str
    load: ReplicaLoad | None = None
    """None: never reported, or too long ago to count."""
    max_running: int = 1
    """Requests the engine runs at once (``max_num_seqs``); 1 until it has said."""
    kv_capacity_tokens: int | None = None
    draining: bool = False
    role: Role = Role.UNIFIED
    assigned: Assigned = NOTHING
    """What this process has open on it."""
    assigned_when_measured: Assigned = NOTHING
    """What this process had open on it at ``load.measured_at``."""

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
    """Why, the label of ``loomserve_route_decisions_total``."""


Pick = Callable[[Sequence[Replica]], Decision]
"""Chooses among one or more candidates; the same candidates in another order change nothing,
except where the policy is random."""
