"""Adds blocks to a radix tree: in memory with their slots, or on SSD with their locations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from loomserve.kvstore.index.radix import (
    KEY_BYTES,
    NOWHERE,
    RadixNode,
    RadixTree,
    blocks_in_memory,
    first_keys,
)


class InitialUse(NamedTuple):
    """Statistics that new blocks start with; ``floor`` is that of what was evicted last."""

    last_used: float
    floor: float
    recompute_s: float


def insert_in_memory(
    tree: RadixTree, keys: bytes, first: int, slots: Sequence[int], use: InitialUse
) -> list[int]:
    path = tree.walk(first_keys(keys, first + len(slots)))
    in_memory = blocks_in_memory(path)
    if first > in_memory:
        return list(slots)
    for node in path:
        node.touch(use.last_used, use.floor)
    at = in_memory - first
    unneeded = list(slots[:at])
    for node in path:
        missing = len(node) - len(node.slots)
        tree.fill(node, slots[at : at + missing])
        at += missing
    if at < len(slots):
        rest = array("q", slots[at:])
        _grow(tree, path, keys, use, slots=rest, locations=array("q", [NOWHERE]) * len(rest))
    return unneeded


def insert_on_ssd(
    tree: RadixTree, keys: bytes, first: int, locations: Sequence[int], use: InitialUse
) -> list[int]:
    path = tree.walk(first_keys(keys, first + len(locations)))
    if first > sum(map(len, path)):
        return list(locations)
    unneeded: list[int] = []
    given = iter(locations)
    start = 0
    for node in path:
        for at in range(max(first - start, 0), len(node)):
            location = next(given)
            if node.locations[at] == NOWHERE:
                node.locations[at] = location
                tree.by_location[location] = node
            else:
                unneeded.append(location)
        start += len(node)
    rest = array("q", given)
    if rest:
        _grow(tree, path, keys, use, slots=array("q"), locations=rest)
    elif path:
        # Blocks are written from the tail of a run on, piece by piece.
        tree.join(path[-1])
    return unneeded


def _grow(
    tree: RadixTree,
    path: list[RadixNode],
    keys: bytes,
    use: InitialUse,
    slots: array[int],
    locations: array[int],
) -> None:
    """Put a run of new blocks, those of ``keys`` after ``path``, behind the path."""
    resident = sum(map(len, path))
    run = RadixNode(
        keys[resident * KEY_BYTES : (resident + len(locations)) * KEY_BYTES],
        slots=slots,
        locations=locations,
        last_used=use.last_used,
        floor=use.floor,
        recompute_s=use.recompute_s,
    )
    tree.grow(path[-1] if path else tree.root, run)
