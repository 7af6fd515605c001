"""Ray's prefix-aware router, made to work for requests that go past Serve's channel.

Ray's router learns prompts and queue lengths only from Serve's own channel. For a caller that
merely picks a replica (``_reserve=False``) it would never match a prefix and always see empty
queues. Here the prompt enters the tree as it is routed, queue lengths come from the snapshots, and
draining or excluded replicas take nothing. The choice itself is Ray's.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.llm.request_router import PrefixCacheAffinityRouter

from loomserve.routers.base import Decision, Replica
from loomserve.routers.decision import decide
from loomserve.routers.policies import power_of_two
from loomserve.routers.serve.request_router import book, eligible_replicas, ranks, ticket_of


class PrefixAwareRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Router that sends a prompt where its longest prefix went, unless queues differ too much."""

    def initialize_state(
        self, *, model: str, stale_after_s: float, imbalanced_threshold: int
    ) -> None:
        """Serve passes ``request_router_kwargs``.

        Args:
            imbalanced_threshold: above this difference of queue lengths, prefixes do not count.
        """
        # Without eviction the tree keeps every prompt for ever.
        super().initialize_state(do_eviction=True)
        self._model = model
        self._threshold = imbalanced_threshold
        self._stale_after_s = stale_after_s
        self._rng = random.Random()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """As :meth:`LoomRouter.choose_replicas`; without text or match, power of two choices."""
        ticket = ticket_of(pending_request)
        eligible = eligible_replicas(candidate_replicas, ticket, self._stale_after_s)
        decision = decide(eligible, partial(power_of_two.pick, rng=self._rng))
        if decision is None:
            return []
        if ticket is None:
            return ranks(candidate_replicas, eligible, decision)
        text = self._normalize_prompt_to_string(ticket.prompt)
        if text:
            matched = await self._ask_prefix_tree(candidate_replicas, eligible, pending_request)
            decision = matched or decision
        book(ticket, eligible, decision, self._model, "prefix_aware")
        answer = ranks(candidate_replicas, eligible, decision)
        if text:
            # Not awaited: one caller's calls to an actor run in order, so the next request sees it.
            chosen = answer[0][0].replica_id.to_full_id_str()
            self._tree_actor.insert.remote(text, chosen, time.monotonic())
        return answer

    def on_request_routed(self, *_: Any) -> None:
        """Nothing: prompts enter the tree above, and Serve's own calls here carry no prompt."""

    async def _ask_prefix_tree(
        self,
        running: list[RunningReplica],
        eligible: list[Replica],
        pending_request: PendingRequest,
    ) -> Decision | None:
        """Ask the tree for the replica that has the prompt's longest prefix.

        If that prefix is short, the answer is the replica with the least text in the tree. None:
        queues differ too much, or the tree knows no eligible replica.
        """
        lengths = {replica.id: replica.queue_length for replica in eligible}
        if max(lengths.values()) - min(lengths.values()) > self._threshold:
            return None
        allowed = [replica for replica in running if replica.replica_id.unique_id in lengths]
        for replica in allowed:
            # Ray's router asks a replica for a queue length it does not know: a round trip.
            self._replica_queue_len_cache.update(
                replica.replica_id, lengths[replica.replica_id.unique_id]
            )
        try:
            (matching,) = await self._prefix_match_best_replicas(pending_request, allowed)
        except KeyError:
            # All gateways share the tree, and another may have heard of a new replica first.
            return None
        ids = {replica.replica_id.unique_id for replica in matching} & lengths.keys()
        if not ids:
            return None
        return Decision(min(ids, key=lambda id_: (lengths[id_], id_)), "prefix_tree")
