"""Locks on paths of radix trees: leases, which expire, and pins, which do not.

A locked path keeps its slots; those of blocks that are removed meanwhile are free after the last
lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, RadixNode, RadixTree, first_keys


class Lease(NamedTuple):
    """Blocks that keep their slots until the lease ends; the slots are in the chain's order."""

    id: int
    slots: array[int]


@dataclass(frozen=True, slots=True)
class _LeasedPath:
    tree: RadixTree
    last: RadixNode
    expires_at: float


class LeaseTable:
    """Leases on paths of any tree, by their ids."""

    def __init__(self) -> None:
        self.ids: Iterator[int] = count(1)
        """Gives ids that no lease has had."""
        self._leased: dict[int, _LeasedPath] = {}

    def __len__(self) -> int:
        return len(self._leased)

    def lock(
        self, tree: RadixTree, keys: bytes, blocks: int, skip: int, expires_at: float
    ) -> Lease | None:
        """Lock the first ``blocks`` blocks of ``keys``; the lease has the slots from ``skip`` on.
        None if not all of them are in memory. ``ValueError`` unless ``0 <= skip < blocks``."""
        if not 0 <= skip < blocks:
            raise ValueError(f"no blocks in [{skip}, {blocks})")
        path = tree.path_in_memory(keys, blocks)
        if path is None:
            return None
        tree.lock(path[-1])
        id_ = next(self.ids)
        self._leased[id_] = _LeasedPath(tree, path[-1], expires_at)
        slots = array("q")
        for node in path:
            slots.extend(node.slots)
        return Lease(id_, slots[skip:])

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leased

    def release(self, lease_id: int) -> list[int]:
        """End a lease, if it has not ended; returns slots of blocks that were removed meanwhile."""
        leased = self._leased.pop(lease_id, None)
        return [] if leased is None else leased.tree.unlock(leased.last)

    def expire(self, now: float) -> list[int]:
        ended = [id_ for id_, leased in self._leased.items() if leased.expires_at <= now]
        return [slot for id_ in ended for slot in self.release(id_)]

    def count_of(self, tree: RadixTree) -> int:
        return sum(leased.tree is tree for leased in self._leased.values())

    def lasts(self) -> Iterator[RadixNode]:
        return (leased.last for leased in self._leased.values())


class PinTable:
    """Pinned paths of a tree, each under its last key. Pinning a path again changes nothing."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._lasts: dict[bytes, RadixNode] = {}

    def pin(self, keys: bytes, blocks: int) -> bool:
        """Lock the first ``blocks`` blocks of ``keys``; False if not all are in memory.
        ``ValueError`` if ``blocks`` is not positive, or ``keys`` is too short."""
        key = _last_key(keys, blocks)
        if key in self._lasts:
            return True
        path = self._tree.path_in_memory(keys, blocks)
        if path is None:
            return False
        self._tree.lock(path[-1])
        self._lasts[key] = path[-1]
        return True

    def unpin(self, keys: bytes, blocks: int) -> None:
        last = self._lasts.pop(_last_key(keys, blocks), None)
        if last is not None:
            self._tree.unlock(last)

    def unpin_removed(self) -> list[int]:
        """End the pins of blocks that were cut from the tree; the slots that became free."""
        removed = [key for key, last in self._lasts.items() if last.detached]
        return [slot for key in removed for slot in self._tree.unlock(self._lasts.pop(key))]

    def lasts(self) -> Iterator[RadixNode]:
        return iter(self._lasts.values())


def _last_key(keys: bytes, blocks: int) -> bytes:
    if blocks < 1:
        raise ValueError(f"cannot pin {blocks} blocks")
    return first_keys(keys, blocks)[-KEY_BYTES:]
