"""Prefix-aware dispatch: to where the prompt's beginning was sent, as far as loads allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loomserve.routers.base import Decision, Replica
from loomserve.routers.policies import load_aware

PREFILL_WEIGHT = 4.0
"""How much more a share of KV cache counts that is to be computed than one that is in use.

A request at work counts in U by its place and by its KV, about alike: with 2, a prompt's tokens
would weigh as much as those of requests at work, as they do in Dynamo by default. But computing a
prompt takes an engine several times as long as another answer in its batch.
"""


def pick(
    replicas: Sequence[Replica],
    *,
    matched: Mapping[str, int],
    blocks: int,
    prompt_tokens: int,
    load_limit: float,
) -> Decision:
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

    Which blocks the KV store of the node has is no matter: any replica of the node can load them.

    Args:
        matched: blocks at the prompt's beginning that replicas were sent; 0 for those not in it.
        blocks: blocks of the prompt.
        load_limit: as :func:`.load_aware.pick` has it.
    """

    def cost(replica: Replica) -> float:
        missing = 1 - matched.get(replica.id, 0) / max(1, blocks)
        # Of unknown capacity, as if the prompt filled it.
        capacity = replica.kv_capacity_tokens or max(1, prompt_tokens)
        return replica.utilisation + PREFILL_WEIGHT * missing * prompt_tokens / capacity

    known = [replica for replica in replicas if replica.load is not None] or replicas
    cheapest = min(known, key=lambda r: (cost(r), r.utilisation, r.queue_length, r.id))
    if matched.get(cheapest.id, 0) > min(matched.get(replica.id, 0) for replica in replicas):
        return Decision(cheapest.id, "prefix")
    return load_aware.pick(replicas, load_limit=load_limit)
