"""Prefix-aware dispatch: to where the prompt's beginning was sent, as far as loads allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from loomserve.routers.base import Candidates, Choice, Floats, Ints, Key, Replica
from loomserve.routers.policies import load_aware
from loomserve.routers.policies.kv_travel import KvLinks, tokens_to_compute
from loomserve.routers.policy import NodesKv, RoutedModel, RoutedRequest, RoutingPolicy
from loomserve.routers.prefix_index import BLOCK_TOKENS, Held, PrefixIndex

PREFILL_WEIGHT = 4.0
"""How much more a share of KV cache counts that is to be computed than one that is in use.

With 2, a prompt's tokens would weigh as much as those of requests at work, as they do in Dynamo by
default. But computing a prompt takes several times as long as another answer in the batch.
"""

Missing = Callable[[Any], Any]
"""Tokens that replicas which were sent so many blocks would compute: of a number, or of many."""

_MOST = 256
"""So many replicas are looked at one by one, and more by columns."""

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

    The cost is U + 4 · (prompt tokens to compute) / (tokens of KV cache), so a long prefix
    outweighs more of load than a short one. A threshold of load alone (Ray; SGLang: 64 requests and
    half as many again) keeps a popular prefix on one replica while others idle below it. By cost it
    comes to a second as soon as the first is a prompt's work ahead. Dynamo's router adds blocks to
    compute and blocks in use; in U queues count as well, so without a match loads alone decide.
    There is no limit of load. A replica of unknown load is not compared while any is known.

    ``held``: what replicas were sent of the prompt; None: nobody was sent any. ``missing``: the
    more they were sent, the less they miss; what their node's store has, they load at a price.
    """
    if held is not None:
        row = _cheapest(candidates, held, missing, prompt_tokens)
        level = held.level(row)
        if level < len(held.levels) and held.some_have_less(candidates, level):
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
    best is among the first few by load. Those after them can be better only if they were sent more:
    they are looked for by load, or if that takes longer, among all that were sent so much.
    """
    columns, unsized = candidates.columns, max(1, prompt_tokens)
    capacities, most_tokens = columns.kv_capacity_tokens, max(columns.most_capacity, unsized)
    weights = [PREFILL_WEIGHT * missing(blocks) for blocks in (*held.levels, 0)]
    floors = [weight / most_tokens for weight in weights]
    open_ = nothing = len(held.levels)

    def cost(key: Key, level: int) -> _Cost:
        return key[0] + weights[level] / (int(capacities[key[2]]) or unsized), *key

    keys = candidates.by_load(known=True)
    first = next(keys, None)
    if not (known := first is not None):
        keys = candidates.by_load(known=False)
        first = next(keys)
    best = cost(first, held.level(first[2]))
    for walked, key in enumerate(keys, 1):
        # What comes from here on may be better if it was sent as much as that level, or more.
        while key[0] + floors[open_] >= best[0]:
            if not open_:
                return best[3]
            open_ -= 1
        if walked > _MOST or (open_ < nothing and 2 * walked > len(held.holders[open_])):
            break
        if (level := held.level(key[2])) <= open_:
            best = min(best, cost(key, level))
    else:
        return best[3]
    if open_ < nothing and len(held.holders[open_]) <= _MOST:
        for key in candidates.keys(held.rows(open_), known=known):
            if key[0] + floors[0] <= best[0]:  # They come in no order.
                best = min(best, cost(key, held.level(key[2])))
        return best[3]
    rows = candidates.rows
    rows = rows[columns.known[rows] == known]
    return min(best, _cheapest_of(candidates, rows, missing(held.column(rows)), prompt_tokens))[3]


def _cheapest_of(candidates: Candidates, rows: Ints, missing: Floats, prompt_tokens: int) -> _Cost:
    columns = candidates.columns
    capacity = columns.kv_capacity_tokens[rows]
    # Of unknown capacity, as if the prompt filled it.
    capacity[capacity == 0] = max(1, prompt_tokens)
    utilisation, queue_length = columns.utilisation[rows], columns.queue_length[rows]
    cost = utilisation + PREFILL_WEIGHT * missing / capacity
    ties = np.flatnonzero(cost == cost.min())
    at = ties[np.lexsort((queue_length[ties], utilisation[ties]))[0]]
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
        levels = self._index(request).match(keys)
        held = Held(levels, replicas.ids, replicas.row_of) if levels else None
        blocks, limit = max(1, len(keys)), self.model.load_limit
        if held is not None and kv is not None and len(replicas.nodes) > 1:
            has = held.column(candidates.rows) / blocks * tokens
            missing = self._by_nodes(candidates, has.astype(np.int64), tokens, kv)
            return pick_by_column(candidates, missing, prompt_tokens=tokens, load_limit=limit)
        # What any was sent, the store of the only node has.
        stored = held.levels[0] / blocks if held is not None and kv is not None else 0.0
        to_load = 1.0 if kv is None else kv.load_share

        def of(sent: Any) -> Any:
            return (1 - stored + to_load * (stored - sent / blocks)) * tokens

        return pick(candidates, held=held, missing=of, prompt_tokens=tokens, load_limit=limit)

    def sent(self, request: RoutedRequest, replica: Replica) -> None:
        if len(self.model.replicas.known_ids) < 2:
            return  # A single one is not compared.
        capacity, kv = replica.kv_capacity_tokens, self.model.kv
        if capacity is not None and kv is not None:
            # What its engine has forgotten, its node's store still has.
            capacity += int(kv.store_bytes / kv.token_bytes)
        most_keys = None if capacity is None else capacity // BLOCK_TOKENS
        self._index(request).sent(replica.id, request.block_keys, most_keys)

    def _index(self, request: RoutedRequest) -> PrefixIndex:
        """The index, without replicas that are gone."""
        index, known = request.ledger.prefixes(self.model.name), self.model.replicas.known_ids
        if self._ids_with_prefixes is not known:
            self._ids_with_prefixes = known
            index.retain(known)
        return index

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
