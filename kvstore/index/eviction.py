"""Eviction policies, which give blocks a value, and the order in which blocks go: lowest first.

Values of one policy compare with each other, across models too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from loomserve.kvstore.index.radix import KEY_BYTES, RadixNode, RadixTree


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Run of blocks of one model that were used together; each field is of one block.

    ``recompute_s`` predicts the seconds to compute it again, or to fetch it from another node.
    ``age_s`` is the time since its last use, or its insertion. ``floor`` is the greatest value at
    which a block had been evicted by then.
    """

    recompute_s: float
    block_bytes: int
    uses: int
    age_s: float
    floor: float = 0.0


Policy = Callable[[EvictionCandidate], float]


def lru(candidate: EvictionCandidate) -> float:
    """Least recently used goes first: ``-age``, in seconds."""
    return -candidate.age_s


def cost(candidate: EvictionCandidate) -> float:
    """Predicted recompute seconds saved per byte kept: Greedy-Dual-Size-Frequency.

    ``value = floor + (1 + uses) * recompute_s / block_bytes``. The floor rises with what is
    evicted, so a block grows old by what the store takes in and not by the clock, by which blocks
    that were read once would keep every new one out of a full store. Source: Cherkasova, "Improving
    WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998.
    """
    saved_s = (1 + candidate.uses) * candidate.recompute_s
    return candidate.floor + saved_s / candidate.block_bytes


POLICIES: Mapping[str, Policy] = {"lru": lru, "cost": cost}


Refetch = Callable[[bytes, bytes, int], float | None]
"""Predicted seconds to fetch a block from another node, by namespace, key and bytes; None: no other
node has it in memory."""


def eviction_order(
    trees: Iterable[RadixTree], policy: Policy, now: float, refetch: Refetch | None = None
) -> Iterator[tuple[float, RadixTree, RadixNode]]:
    """Unlocked nodes in memory and their values: each after all below it, else by rising value.

    A block that another node has too is worth the time to fetch it, where that is less. Of equal
    values the least recently used comes first. The caller may take slots of the node it got.
    """
    heap: list[tuple[float, float, int, RadixTree, RadixNode]] = []
    # Where all else is equal, nodes go in the order of their discovery.
    turn = count()
    followers: dict[RadixNode, int] = {}

    def consider(tree: RadixTree, node: RadixNode) -> None:
        if followers[node] or node.locks:
            return
        age_s = now - node.last_used
        recompute_s = node.recompute_s
        if refetch is not None:
            recompute_s = min(recompute_s, _refetch_s(refetch, tree, node))
        value = policy(
            EvictionCandidate(recompute_s, tree.block_bytes, node.uses, age_s, node.floor)
        )
        heappush(heap, (value, node.last_used, next(turn), tree, node))

    for tree in trees:
        stack = [tree.root]
        while stack:
            node = stack.pop()
            below = [child for child in node.children.values() if child.slots]
            stack.extend(below)
            if node is not tree.root:
                followers[node] = len(below)
                consider(tree, node)
    while heap:
        value, *_, tree, node = heappop(heap)
        # Now, since the caller may split the node.
        parent = node.parent
        yield value, tree, node
        if parent in followers:
            followers[parent] -= 1
            consider(tree, parent)


def _refetch_s(refetch: Refetch, tree: RadixTree, node: RadixNode) -> float:
    """Seconds to fetch one of the node's blocks in memory, of which the last one goes first."""
    end = len(node.slots) * KEY_BYTES
    seconds = refetch(tree.namespace, node.keys[end - KEY_BYTES : end], tree.block_bytes)
    return math.inf if seconds is None else seconds
