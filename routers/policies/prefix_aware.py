"""Prefix-aware dispatch: to where the prompt's beginning was sent, as far as loads allow."""

from __future__ import annotations

import numpy as np

from loomserve.routers.base import Candidates, Choice, Floats, least
from loomserve.routers.policies import load_aware

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

    Args:
        missing: tokens of the prompt that each candidate would compute; None: nobody was sent any.
        prompt_tokens: all of them.
        load_limit: as :func:`.load_aware.pick` has it.
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
