"""Prefix-aware dispatch: to where the prompt's beginning was sent, as far as loads allow."""

from __future__ import annotations

from typing import Any

import numpy as np

from loomserve.routers.base import Candidates, Choice, Floats, Replica, least
from loomserve.routers.block_keys import BLOCK_TOKENS
from loomserve.routers.policies import load_aware
from loomserve.routers.policies.kv_travel import KvLinks, tokens_to_compute
from loomserve.routers.policy import NodesKv, RoutedModel, RoutedRequest, RoutingPolicy

PREFILL_WEIGHT = 4.0
"""How much more a share of KV cache counts that is to be computed than one that is in use.

A request at work counts in U by its place and by its KV, about alike: with 2, a prompt's tokens
would weigh as much as those of requests at work, as they do in Dynamo by default. But computing a
prompt takes an engine several times as long as another answer in its batch.
"""


def pick(
    candidates: Candidates,
    *,
    missing: Floats | None,
    prompt_tokens: int,
    load_limit: float,
) -> Choice:
    """The replica of the least cost if it has more of the prompt than others, else by load.

    The cost is U + 4 · (prompt tokens to compute) / (tokens of KV cache). So a replica is preferred
    by what its prefix saves, and a long prefix outweighs more of load than a short one. A threshold
    of load alone (Ray; SGLang: 64 requests and half as many again) keeps a popular prefix on one
    replica while others idle below it, and above it gives up long prefixes with the short. By
    cost, a popular prefix comes to a second replica as soon as the first is a prompt's work ahead.
    Dynamo's router adds prompt blocks to compute and blocks in use; here it is U, in which queues
    count as well, so that without a match loads alone decide, as in :mod:`.load_aware`.

    There is no limit of load: what a prefix saves counts the more where all are full. A replica of
    unknown load is not compared while any is known.

    Which blocks the KV store of the only node has is no matter: any replica can load them. Of
    several nodes, those that have less of the prompt may fetch it (:mod:`.kv_travel`).

    ``missing``: tokens that each candidate would compute; None: nobody was sent any.
    """
    if missing is None:
        return load_aware.pick(candidates, load_limit=load_limit)
    capacity = candidates.kv_capacity_tokens
    if np.count_nonzero(capacity) < len(capacity):
        # Of unknown capacity, as if the prompt filled it.
        capacity = np.where(capacity > 0, capacity, max(1, prompt_tokens))
    cost = candidates.utilisation + PREFILL_WEIGHT * missing / capacity
    if candidates.some_unknown:
        cost[~candidates.known] = np.inf
    place = least(cost, candidates.utilisation, candidates.queue_length)
    if missing[place] < missing[missing.argmax()]:
        return Choice(place, "prefix")
    return load_aware.pick(candidates, load_limit=load_limit)


class PrefixAware(RoutingPolicy):
    """Remembers what replicas were sent in the ledger's index, which those of a model share."""

    def __init__(self, options: Any, model: RoutedModel) -> None:
        super().__init__(options, model)
        self._ids_with_prefixes: frozenset[str] = frozenset()
        self._links: tuple[NodesKv, tuple[str, ...], KvLinks] | None = None

    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        return pick(
            candidates,
            missing=self._missing(candidates, request),
            prompt_tokens=request.prompt_tokens,
            load_limit=self.model.load_limit,
        )

    def sent(self, request: RoutedRequest, replica: Replica) -> None:
        """What was sent to replicas that are gone is forgotten."""
        capacity, kv = replica.kv_capacity_tokens, self.model.kv
        if capacity is not None and kv is not None:
            # What its engine has forgotten, its node's store still has.
            capacity += int(kv.store_bytes / kv.token_bytes)
        index, known = request.ledger.prefixes(self.model.name), self.model.replicas.known_ids
        if self._ids_with_prefixes is not known:
            self._ids_with_prefixes = known
            index.retain(known)
        index.sent(
            replica.id,
            request.block_keys,
            most_keys=None if capacity is None else capacity // BLOCK_TOKENS,
        )

    def _missing(self, candidates: Candidates, request: RoutedRequest) -> Floats | None:
        replicas, kv = self.model.replicas, self.model.kv
        keys, tokens = request.block_keys, request.prompt_tokens
        matched = request.ledger.prefixes(self.model.name).match(keys, replicas.ids)
        if matched is None:
            return None
        if len(candidates) < len(matched):
            matched = matched.take(candidates.rows)
        share = matched / max(1, len(keys))
        if kv is None or len(replicas.nodes) < 2:
            return (1 - share) * tokens
        made = self._links
        if made is None or made[0] is not kv or made[1] is not replicas.nodes:
            made = self._links = kv, replicas.nodes, KvLinks.between(replicas.nodes, kv.links)
        nodes, s_per_token = replicas.places(candidates.rows)
        return tokens_to_compute(
            (share * tokens).astype(np.int64),
            nodes,
            tokens,
            s_per_token=s_per_token,
            token_bytes=kv.token_bytes,
            links=made[2],
        )
