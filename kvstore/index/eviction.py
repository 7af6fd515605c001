"""Eviction policies, which give blocks a value, and the order in which blocks go: lowest first.

Values of one policy compare with each other, across models too, and hold whatever the time is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from loomserve.kvstore.index.radix import KEY_BYTES, RadixNode, RadixTree


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Run of blocks of one model that were used together; each field is of one block.

    ``recompute_s`` predicts the seconds to compute it again, or to fetch it from another node.
    ``last_used`` is the time of its last use, or its insertion. ``floor`` is the greatest value at
    which a block had been evicted by then.
    """

    recompute_s: float
    block_bytes: int
    uses: int
    last_used: float
    floor: float = 0.0


Policy = Callable[[EvictionCandidate], float]


def lru(candidate: EvictionCandidate) -> float:
    """Least recently used goes first."""
    return candidate.last_used


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

# As many blocks are valued again at each look at the order, where other nodes' copies count.
_VALUED_AGAIN = 64

_Entry = tuple[float, float, int, RadixNode]
"""Value and last use, and what puts equal ones into an order that stays."""


class EvictionQueue:
    """A tree's nodes in the order in which they leave memory: each after all below it, else by
    rising value, and of equal values the least recently used first.

    A heap of the nodes that may go. A use, a lock or a block behind a node changes nothing in it,
    since each can only put the node's turn off: that is seen when it has come. So all that the tree
    tells, in ``changed``, is which nodes may go or are worth less than before.

    A block that another node has too is worth the time to fetch it, where that is less. Copies that
    come and go, and links whose rates change, are seen as all blocks are valued again in turn.
    """

    def __init__(self, tree: RadixTree, policy: Policy, refetch: Refetch | None = None) -> None:
        self.tree, self._policy, self._refetch = tree, policy, refetch
        self._heap: list[_Entry] = []
        self._valued = 0

    def order(self) -> Iterator[tuple[float, RadixTree, RadixNode]]:
        """Unlocked nodes in memory and their values, while the tree stays as it is."""
        heap, changed = self._heap, self.tree.changed
        if self._refetch is not None:
            begin = self._valued % max(1, len(heap))
            self._valued = begin + _VALUED_AGAIN
            changed.update((node, None) for *_, node in heap[begin : self._valued])
        self.take_in()
        left: dict[RadixNode, int] = {}
        while heap:
            entry = heappop(heap)
            node = entry[-1]
            if node.turn is not entry:
                continue
            node.turn = None
            if not (node.may_go or (left.get(node) == 0 and not node.locks)):
                continue
            now = self._entry(node)
            if now[:2] > entry[:2]:
                self._push(now)
                continue
            # Whatever becomes of it, it is looked at again.
            changed[node] = None
            yield now[0], self.tree, node
            parent = node.parent
            assert parent is not None
            left[parent] = left.get(parent, parent.below) - 1
            if not (left[parent] or parent.locks or parent is self.tree.root):
                self._push(self._entry(parent))

    def take_in(self) -> None:
        """Take in what has changed in the tree."""
        changed = self.tree.changed
        while changed:
            node = changed.popitem()[0]
            if node.may_go:
                entry = self._entry(node)
                if node.turn is None or entry < node.turn:
                    self._push(entry)

    def _push(self, entry: _Entry) -> None:
        entry[-1].turn = entry
        heappush(self._heap, entry)

    def _entry(self, node: RadixNode) -> _Entry:
        size, recompute_s = self.tree.block_bytes, node.recompute_s
        if self._refetch is not None and node.slots:
            recompute_s = min(recompute_s, _refetch_s(self._refetch, self.tree, node))
        of = EvictionCandidate(recompute_s, size, node.uses, node.last_used, node.floor)
        return self._policy(of), node.last_used, id(node), node


def _refetch_s(refetch: Refetch, tree: RadixTree, node: RadixNode) -> float:
    """Seconds to fetch one of the node's blocks in memory, of which the last one goes first."""
    end = len(node.slots) * KEY_BYTES
    seconds = refetch(tree.namespace, node.keys[end - KEY_BYTES : end], tree.block_bytes)
    return math.inf if seconds is None else seconds
