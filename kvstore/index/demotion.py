"""Chooses blocks to write to SSD before they are evicted and lost."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import count, groupby
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, RadixNode, RadixTree


class Demotion(NamedTuple):
    """Blocks from ``first`` to the end of the chain ``keys``, in these slots and not on SSD."""

    namespace: bytes
    keys: bytes
    first: int
    slots: array[int]


def demotions(order: Iterable[tuple[float, RadixTree, RadixNode]], blocks: int) -> list[Demotion]:
    """First ``blocks`` blocks, in the order of eviction, that are in memory and not on SSD."""
    found: list[Demotion] = []
    for _, tree, node in order:
        if blocks <= 0:
            break
        positions = [at for at in range(len(node.slots)) if node.locations[at] == NOWHERE]
        positions = positions[-blocks:]
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
