"""Chooses blocks to write to SSD before they are evicted and lost."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import count, groupby
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, RadixNode, RadixTree


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
    ``mirror_bytes`` together. The caller leases them while it copies them, and calls
    :meth:`Index.insert_ssd` afterwards.
    """
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
