"""The request router that Ray Serve runs in every gateway: a shell around the policies.

Serve (2.60) pickles this module by value, so it has no state of its own.
"""

from __future__ import annotations

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter

from loomserve.platform.config.router import RoutingPolicy
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy_choice import ReplicaChooser
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.ticket import RoutingTicket


class LoomRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Router of Loomserve's own policies.

    A request that comes with a :class:`RoutingTicket` is booked when it is routed. Calls without
    one (control calls through a handle) are routed by the replicas' reports alone and not booked,
    for Serve's own queue lengths see them.
    """

    def initialize_state(
        self, *, model: str, policy: RoutingPolicy, load_limit: float, stale_after_s: float
    ) -> None:
        """Serve passes ``request_router_kwargs``; see :class:`loomserve.platform.config.Router`."""
        self._chooser = ReplicaChooser(
            model, policy, load_limit=load_limit, stale_after_s=stale_after_s
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The pick, then the other eligible replicas, for when Serve finds it full.

        Empty if there is none. Given nothing, Serve asks again after a pause, without end: the
        caller sets a time limit.
        """
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # A call without a ticket is booked in a ledger that nobody keeps.
        ticket = _ticket_of(pending_request) or RoutingTicket(InFlight())
        decision = self._chooser.decide(
            {id_: _stats(replica) for id_, replica in replicas.items()}, ticket
        )
        if decision is None:
            return []
        ranks = [[decision.replica_id], decision.others]
        return [[replicas[id_] for id_ in rank] for rank in ranks if rank]


def _ticket_of(pending_request: PendingRequest | None) -> RoutingTicket | None:
    if pending_request is None:
        return None
    # Without this, Serve asks a router that has no candidate again at once, and the loop hangs.
    pending_request.routing_context.should_backoff = True
    first = pending_request.args[0] if pending_request.args else None
    return first if isinstance(first, RoutingTicket) else None


def _stats(replica: RunningReplica) -> RoutingStats | None:
    return RoutingStats.model_validate(replica.routing_stats) if replica.routing_stats else None
