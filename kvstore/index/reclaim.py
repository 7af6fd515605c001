"""Which slots to empty together, so that their memory can serve blocks of another size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set

from loomserve.kvstore.index.radix import Freed, RadixNode, RadixTree


def group_to_reclaim(
    trees: Iterable[RadixTree], groups: Sequence[Collection[int]]
) -> set[int] | None:
    """The group of slots that was used longest ago and can be emptied; None if there is none.

    A group that has a slot which is leased, pinned or in none of the trees stays. Of equally old
    groups, the one with fewest blocks in memory from its own on is chosen. Passes over all slots.
    """
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
