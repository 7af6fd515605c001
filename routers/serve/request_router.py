"""The request router that Ray Serve runs in every gateway: a shell around the policies.

Serve (2.60) pickles this module by value and imports all others by name, so the ledger is reached
through its module: as a global of this one it would be copied, and the gateway's would be another.
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

from loomserve.routers import in_flight
from loomserve.routers.base import Decision, Pick, Replica, RoutingPayload
from loomserve.routers.decision import candidates, decide
from loomserve.routers.policies import load_aware, power_of_two, round_robin
from loomserve.routers.snapshot import RoutingStats, snapshot


class LoomRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Routes by one of Loomserve's own policies.

    A request that comes with a :class:`RoutingPayload` is booked in the ledger when it is routed;
    whoever made the booking finishes it. Calls without one (control calls through a handle) are
    routed alike and not booked, for Serve's own queue lengths see them.
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
        payload = payload_of(pending_request)
        eligible = eligible_replicas(candidate_replicas, payload, self._stale_after_s)
        decision = decide(eligible, self._pick())
        if decision is None:
            return []
        if payload is not None:
            book(payload, eligible, decision, self._model, self._policy)
        return ranks(candidate_replicas, eligible, decision)

    def _pick(self) -> Pick:
        if self._policy == "load_aware":
            return partial(load_aware.pick, load_limit=self._load_limit)
        if self._policy == "round_robin":
            return partial(round_robin.pick, turn=next(self._turns))
        return partial(power_of_two.pick, rng=self._rng)


def payload_of(pending_request: PendingRequest | None) -> RoutingPayload | None:
    if pending_request is None:
        return None
    # Without this, Serve asks a router that has no candidate again at once, and the loop hangs.
    pending_request.routing_context.should_backoff = True
    first = pending_request.args[0] if pending_request.args else None
    return first if isinstance(first, RoutingPayload) else None


def eligible_replicas(
    running: list[RunningReplica], payload: RoutingPayload | None, stale_after_s: float
) -> list[Replica]:
    """Snapshots of the replicas that may take the request, now."""
    return candidates(
        [
            snapshot(replica.replica_id.unique_id, _stats(replica), in_flight.IN_FLIGHT)
            for replica in running
        ],
        exclude=frozenset() if payload is None else payload.exclude,
        pinned_to=None if payload is None else payload.pinned_to,
        now=time.time(),
        stale_after_s=stale_after_s,
    )


def _stats(replica: RunningReplica) -> RoutingStats | None:
    return RoutingStats.model_validate(replica.routing_stats) if replica.routing_stats else None


def book(
    payload: RoutingPayload, eligible: list[Replica], decision: Decision, model: str, policy: str
) -> None:
    """Raise the chosen replica's load by the request's estimate, and count the decision."""
    ledger = in_flight.IN_FLIGHT
    payload.chosen.append(next(one for one in eligible if one.id == decision.replica_id))
    ledger.started(payload.booking, decision.replica_id, payload.tokens, time.time())
    ledger.decided(model, policy, decision.reason)


def ranks(
    running: list[RunningReplica], eligible: list[Replica], decision: Decision
) -> list[list[RunningReplica]]:
    """Serve's answer: the pick, then the rest of the eligible for when Serve finds it full."""
    by_id = {replica.replica_id.unique_id: replica for replica in running}
    rest = [by_id[replica.id] for replica in eligible if replica.id != decision.replica_id]
    return [[by_id[decision.replica_id]], rest] if rest else [[by_id[decision.replica_id]]]
