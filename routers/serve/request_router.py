"""The request router that Ray Serve runs in every gateway: a shell around the policies.

Serve (2.60) pickles this module by value, so it has no state of its own.
"""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from typing import Literal

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter

from loomserve.routers.base import Decision, Pick, Replica
from loomserve.routers.decision import candidates, decide
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policies import load_aware, power_of_two, round_robin
from loomserve.routers.snapshot import RoutingStats, snapshot
from loomserve.routers.ticket import RoutingTicket


class LoomRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Router of one of Loomserve's own policies.

    A request that comes with a :class:`RoutingTicket` is booked when it is routed. Calls without
    one (control calls through a handle) are routed by the replicas' reports alone and not booked,
    for Serve's own queue lengths see them.
    """

    def initialize_state(
        self,
        *,
        model: str,
        policy: Literal["load_aware", "round_robin", "power_of_two"],
        load_limit: float,
        stale_after_s: float,
    ) -> None:
        """Serve passes ``request_router_kwargs``; see :class:`loomserve.platform.config.Router`."""
        self._model = model
        self._policy = policy
        self._load_limit = load_limit
        self._stale_after_s = stale_after_s
        self._rng = random.Random()
        # Gateways start at different turns, or they would all favour the same replica.
        self._turns = itertools.count(self._rng.randrange(2**16))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The pick, then the other eligible replicas; empty if there is none.

        Given nothing, Serve asks again after a pause, without end: the caller sets a time limit.
        """
        ticket = ticket_of(pending_request)
        eligible = eligible_replicas(candidate_replicas, ticket, self._stale_after_s)
        decision = decide(eligible, self._pick())
        if decision is None:
            return []
        if ticket is not None:
            book(ticket, eligible, decision, self._model, self._policy)
        return ranks(candidate_replicas, eligible, decision)

    def _pick(self) -> Pick:
        if self._policy == "load_aware":
            return partial(load_aware.pick, load_limit=self._load_limit)
        if self._policy == "round_robin":
            return partial(round_robin.pick, turn=next(self._turns))
        return partial(power_of_two.pick, rng=self._rng)


def ticket_of(pending_request: PendingRequest | None) -> RoutingTicket | None:
    if pending_request is None:
        return None
    # Without this, Serve asks a router that has no candidate again at once, and the loop hangs.
    pending_request.routing_context.should_backoff = True
    first = pending_request.args[0] if pending_request.args else None
    return first if isinstance(first, RoutingTicket) else None


def eligible_replicas(
    running: list[RunningReplica], ticket: RoutingTicket | None, stale_after_s: float
) -> list[Replica]:
    """Snapshots of the replicas that may take the request, now."""
    if ticket is None:
        ticket = RoutingTicket(InFlight())
    return candidates(
        [
            snapshot(replica.replica_id.unique_id, _stats(replica), ticket.ledger)
            for replica in running
        ],
        exclude=ticket.exclude,
        pinned_to=ticket.pinned_to,
        now=time.monotonic(),
        stale_after_s=stale_after_s,
    )


def _stats(replica: RunningReplica) -> RoutingStats | None:
    return RoutingStats.model_validate(replica.routing_stats) if replica.routing_stats else None


def book(
    ticket: RoutingTicket, eligible: list[Replica], decision: Decision, model: str, policy: str
) -> None:
    """Book the request on the chosen replica, and count the decision."""
    ticket.book(next(one for one in eligible if one.id == decision.replica_id))
    ticket.ledger.decided(model, policy, decision.reason)


def ranks(
    running: list[RunningReplica], eligible: list[Replica], decision: Decision
) -> list[list[RunningReplica]]:
    """Serve's answer: the pick, then the rest of the eligible for when Serve finds it full."""
    by_id = {replica.replica_id.unique_id: replica for replica in running}
    rest = [by_id[replica.id] for replica in eligible if replica.id != decision.replica_id]
    return [[by_id[decision.replica_id]], rest] if rest else [[by_id[decision.replica_id]]]
