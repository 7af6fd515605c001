"""Prefix-aware dispatch: to where the prompt's beginning was sent, as far as loads allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from loomserve.routers.base import Candidates, Choice, Floats, Ints, Replica, least
from loomserve.routers.block_keys import BLOCK_TOKENS
from loomserve.routers.policies import load_aware
from loomserve.routers.policies.kv_travel import KvLinks, tokens_to_compute
from loomserve.routers.policy import NodesKv, RoutedModel, RoutedRequest, RoutingPolicy
from loomserve.routers.prefix_index import Held

PREFILL_WEIGHT = 4.0
"""How much more a share of KV cache counts that is to be computed than one that is in use.

A request at work counts in U by its place and by its KV, about alike: with 2, a prompt's tokens
would weigh as much as those of requests at work, as they do in Dynamo by default. But computing a
prompt takes an engine several times as long as another answer in its batch.
"""


Missing = Callable[[Any], Any]
"""Tokens that replicas which were sent so many blocks would compute: of a number, or of many."""

_WALKED = 8
"""So many of the least loaded are looked at one by one; often no other can be the best."""

_Cost = tuple[float, float, float, int]
"""The cost, U, the queue's length and the row of a candidate: the least is the best."""


def pick(
    candidates: Candidates,
    *,
    held: Held | None,
    missing: Missing,
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

    What the KV store of a node has, its replicas load, which costs a little of what computing does.
    Of several nodes, those that have less of the prompt may fetch it (:mod:`.kv_travel`).

    ``held``: what replicas were sent of the prompt; None: nobody was sent any. ``missing``: the
    more they were sent, the less they miss.
    """
    if held is not None:
        row = _cheapest(candidates, held, missing, prompt_tokens)
        blocks = held.blocks(row)
        if blocks and held.some_have_less(candidates, blocks):
            return Choice(candidates.place(row), "prefix")
    return load_aware.pick(candidates, load_limit=load_limit)


def pick_by_column(
    candidates: Candidates, missing: Floats, *, prompt_tokens: int, load_limit: float
) -> Choice:
    """The same where what is missing differs by node: ``missing`` is that of each candidate."""
    rows = candidates.rows
    known = candidates.columns.known[rows]
    some = known if known.any() else ~known
    best = _cheapest_of(candidates, rows[some], missing[some], prompt_tokens)
    place = candidates.place(best[3])
    if missing[place] < missing.max():
        return Choice(place, "prefix")
    return load_aware.pick(candidates, load_limit=load_limit)


def _cheapest(candidates: Candidates, held: Held, missing: Missing, prompt_tokens: int) -> int:
    """The row of the least cost.

    Of replicas of one size that were sent as much, the least loaded costs least. So as a rule the
    best is among the first few by load, or it was sent more than these.
    """
    columns, levels = candidates.columns, [*held.levels, 0]
    known, capacities = columns.known, columns.kv_capacity_tokens
    most_tokens = max(columns.most_capacity, prompt_tokens, 1)
    best: _Cost = (math.inf, 0.0, 0.0, 0)
    walked, least_u, among_known = 0, 0.0, True

    def open_(blocks: int) -> bool:
        """Whether one that has so much, and was not looked at, may be better."""
        return bool(least_u + PREFILL_WEIGHT * missing(blocks) / most_tokens < best[0])

    for least_u, queue_length, row in islice(candidates.by_load(), _WALKED):
        if not walked:
            among_known = bool(known[row])
        elif known[row] != among_known or not open_(levels[0]):
            return best[3]
        walked += 1
        tokens = int(capacities[row]) or max(1, prompt_tokens)
        cost = float(least_u + PREFILL_WEIGHT * missing(held.blocks(row)) / tokens)
        best = min(best, (cost, least_u, queue_length, row))
    if walked == _WALKED and (left := sum(map(open_, levels))):
        # They miss the less the sooner they come, so the last of them has them all.
        all_may = left == len(levels)
        rows = candidates.rows if all_may else candidates.among(held.rows(left - 1))
        rows = rows[known[rows] == among_known]
        if len(rows):
            of_rows = missing(held.column(rows))
            best = min(best, _cheapest_of(candidates, rows, of_rows, prompt_tokens))
    return best[3]


def _cheapest_of(candidates: Candidates, rows: Ints, missing: Floats, prompt_tokens: int) -> _Cost:
    columns = candidates.columns
    capacity = columns.kv_capacity_tokens[rows]
    # Of unknown capacity, as if the prompt filled it.
    capacity[capacity == 0] = max(1, prompt_tokens)
    utilisation, queue_length = columns.utilisation[rows], columns.queue_length[rows]
    cost = utilisation + PREFILL_WEIGHT * missing / capacity
    at = least(cost, utilisation, queue_length)
    return float(cost[at]), float(utilisation[at]), float(queue_length[at]), int(rows[at])


class PrefixAware(RoutingPolicy):
    """Remembers what replicas were sent in the ledger's index, which those of a model share."""

    def __init__(self, options: Any, model: RoutedModel) -> None:
        super().__init__(options, model)
        self._ids_with_prefixes: frozenset[str] = frozenset()
        self._links: tuple[NodesKv, tuple[str, ...], KvLinks] | None = None

    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        kv, replicas = self.model.kv, self.model.replicas
        keys, tokens = request.block_keys, request.prompt_tokens
        held = request.ledger.prefixes(self.model.name).match(keys, replicas.ids)
        blocks, limit = max(1, len(keys)), self.model.load_limit
        if held is not None and kv is not None and len(replicas.nodes) > 1:
            has = held.column(candidates.rows) / blocks * tokens
            missing = self._by_nodes(candidates, has.astype(np.int64), tokens, kv)
            return pick_by_column(candidates, missing, prompt_tokens=tokens, load_limit=limit)
        # What any was sent, the store of the only node has.
        stored = held.levels[0] / blocks if held is not None and kv is not None else 0.0
        to_load = 0.0 if kv is None else kv.load_share

        def of(sent: Any) -> Any:
            share = sent / blocks
            if kv is None:
                return (1 - share) * tokens
            return (1 - stored + to_load * (stored - share)) * tokens

        return pick(candidates, held=held, missing=of, prompt_tokens=tokens, load_limit=limit)

    def sent(self, request: RoutedRequest, replica: Replica) -> None:
        """What was sent to replicas that are gone is forgotten; a single one is not compared."""
        known = self.model.replicas.known_ids
        if len(known) < 2:
            return
        capacity, kv = replica.kv_capacity_tokens, self.model.kv
        if capacity is not None and kv is not None:
            # What its engine has forgotten, its node's store still has.
            capacity += int(kv.store_bytes / kv.token_bytes)
        index = request.ledger.prefixes(self.model.name)
        if self._ids_with_prefixes is not known:
            self._ids_with_prefixes = known
            index.retain(known)
        index.sent(
            replica.id,
            request.block_keys,
            most_keys=None if capacity is None else capacity // BLOCK_TOKENS,
        )

    def _by_nodes(
        self, candidates: Candidates, has: Ints, prompt_tokens: int, kv: NodesKv
    ) -> Floats:
        replicas, made = self.model.replicas, self._links
        if made is None or made[0] is not kv or made[1] is not replicas.nodes:
            made = self._links = kv, replicas.nodes, KvLinks.between(replicas.nodes, kv.links)
        nodes, s_per_token = replicas.places(candidates.rows)
        return tokens_to_compute(
            has,
            nodes,
            prompt_tokens,
            s_per_token=s_per_token,
            token_bytes=kv.token_bytes,
            links=made[2],
            load_share=kv.load_share,
        )
