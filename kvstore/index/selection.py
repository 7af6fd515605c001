"""Which blocks are worth a move: to SSD before eviction, to another node, out of an extent."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import count, groupby
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, Freed, RadixNode, RadixTree


class Demotion(NamedTuple):
    """Blocks from ``first`` to the end of the chain ``keys``, in these slots and not on SSD."""

    namespace: bytes
    keys: bytes
    first: int
    slots: array[int]


def demotions(
    order: Iterable[tuple[float, RadixTree, RadixNode]],
    blocks: int,
    mirror_bytes: int = sys.maxsize,
    record_bytes: Callable[[bytes], int] = lambda _: 1,
) -> list[Demotion]:
    """First ``blocks`` blocks, in the ``order`` of eviction, that are in memory and not on SSD.
    They are among the first whose records, each of its namespace's ``record_bytes``, take
    ``mirror_bytes`` together. The caller leases them while it copies them."""
    found: list[Demotion] = []
    for _, tree, node in order:
        size = record_bytes(tree.namespace)
        near = min(mirror_bytes // size, len(node.slots))
        if blocks <= 0 or near <= 0:
            break
        mirror_bytes -= near * size
        there = range(len(node.slots) - near, len(node.slots))
        positions = [at for at in there if node.locations[at] == NOWHERE][-blocks:]
        blocks -= len(positions)
        found.extend(_runs(tree, node, positions))
    return found


def _runs(tree: RadixTree, node: RadixNode, positions: list[int]) -> list[Demotion]:
    """A demotion for each run of consecutive ``positions`` of ``node``, the last run first."""
    chain = node.chain()
    start = len(chain) // KEY_BYTES - len(node)
    # Consecutive positions have the same difference to a counter.
    counter = count()
    runs = [list(run) for _, run in groupby(positions, key=lambda at: at - next(counter))]
    return [
        Demotion(
            tree.namespace,
            chain[: (start + run[-1] + 1) * KEY_BYTES],
            start + run[0],
            node.slots[run[0] : run[-1] + 1],
        )
        for run in reversed(runs)
    ]


def hottest_chains(trees: Iterable[RadixTree], most_bytes: int) -> list[tuple[bytes, bytes]]:
    """Namespace and keys of chains in memory, of so many bytes together, the last used first. A
    chain that another begins with is a part of that."""
    nodes = [(node, tree) for tree in trees for node in tree.nodes() if node.slots]
    nodes.sort(key=lambda each: each[0].last_used, reverse=True)
    taken: dict[RadixNode, RadixTree] = {}
    for node, tree in nodes:
        new = [each for each in node.path() if each not in taken]
        most_bytes -= sum(len(each.slots) for each in new) * tree.block_bytes
        if most_bytes < 0:
            break
        taken |= dict.fromkeys(new, tree)
    within = {parent for node in taken for parent in node.path() if parent is not node}
    return [
        (tree.namespace, node.chain()[: _in_memory(node)])
        for node, tree in taken.items()
        if node not in within
    ]


def _in_memory(node: RadixNode) -> int | None:
    """Where a node's chain of keys leaves memory; None: not at all."""
    return -(len(node) - len(node.slots)) * KEY_BYTES or None


def group_to_reclaim(
    trees: Iterable[RadixTree], groups: Sequence[Collection[int]]
) -> set[int] | None:
    """The group of slots that was used longest ago and can be emptied; None if there is none. A
    group with a slot that is leased, pinned or in none of the trees stays. Of equally old groups,
    the one with fewest blocks in memory from its own on is chosen. Passes over all slots."""
    group_of = {slot: number for number, group in enumerate(groups) for slot in group}
    free = Counter[int]()
    cost = Counter[int]()
    last_used: dict[int, float] = {}
    for tree in trees:
        for node, blocks in _blocks_from(tree).items():
            held = [group_of.get(slot, -1) for slot in node.slots]
            if not node.locks:
                free.update(held)
            for number in set(held):
                cost[number] += blocks - held.index(number)
                last_used[number] = max(node.last_used, last_used.get(number, node.last_used))
    whole = [number for number, group in enumerate(groups) if free[number] == len(group)]
    if not whole:
        return None
    return set(groups[min(whole, key=lambda at: (last_used[at], cost[at]))])


def take_slots(tree: RadixTree, slots: Set[int]) -> Freed:
    """Evicts these unlocked slots, and all in memory below them."""
    freed = Freed([], [])
    for node in list(tree.nodes()):
        at = next((at for at, slot in enumerate(node.slots) if slot in slots), None)
        if at is None:
            continue
        for below in reversed(list(node.subtree())):
            blocks = len(below.slots) - (at if below is node else 0)
            if blocks > 0:
                freed.add(tree.evict(below, blocks))
    return freed


def _blocks_from(tree: RadixTree) -> dict[RadixNode, int]:
    """How many blocks in memory each node and all below it have; parents first."""
    blocks = {node: len(node.slots) for node in tree.nodes()}
    for node in reversed(blocks):
        if node.parent is not None and node.parent is not tree.root:
            blocks[node.parent] += blocks[node]
    return blocks
