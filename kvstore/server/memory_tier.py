"""Blocks in memory: the arena and the index in step, and room for blocks that come."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.index.recovery import chain_runs, header_at
from loomserve.kvstore.server.grants import Leases, Reservation
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockHeader, seed
from loomserve.kvstore.storage.ssd import SsdTier

UNKNOWN_RECOMPUTE_S = 0.03
"""Seconds to compute a block whose engine died before it said: 1,000 tokens a second."""


class MemoryTier:
    """The arena's blocks, with their index, namespaces and leases.

    Slots are reserved, for which the least valuable blocks are evicted, until they are filled or
    cancelled. ``quotas`` bounds the bytes that a model may hold in memory; a model that is not
    named may hold all. Blocks of different sizes share the arena's extents equally where they
    compete.
    """

    def __init__(
        self, arena: ArenaOwner, index: Index, spaces_file: Path, quotas: Mapping[str, int]
    ) -> None:
        self.arena = arena
        self.index = index
        self.spaces = Spaces(spaces_file, index, arena.extent_bytes)
        self.leases = Leases(index, arena)
        self.corrupt_blocks = 0
        """Blocks that were found damaged."""
        self._quotas = quotas
        # By their first slots.
        self._reserved: dict[int, Reservation] = {}
        self._generations = itertools.count()

    def rebuild(self, ssd: SsdTier | None, now: float) -> None:
        """Put every block whose ancestors are all there into the empty index; free other slots."""
        self.spaces.load()
        in_memory = self._found()
        on_ssd = {
            entry.header: entry.location
            for entry in (ssd.entries() if ssd else ())
            if entry.header.namespace in self.spaces
        }
        everywhere = [*in_memory, *on_ssd]
        reached: set[int] = set()
        for run in chain_runs(in_memory, in_memory):
            self.arena.free(self.index.insert(*run, now, UNKNOWN_RECOMPUTE_S))
            reached.update(run.places)
        self.arena.free(set(in_memory.values()) - reached)
        for run in chain_runs(on_ssd, everywhere):
            self.index.insert_ssd(*run, now, UNKNOWN_RECOMPUTE_S)

    def reserve(
        self, namespace: bytes, keys: bytes, in_memory: int, first: int, blocks: int, now: float
    ) -> Reservation | None:
        """Slots for as many of ``blocks`` blocks from ``first`` on as can be had; None: for none.
        The first ``in_memory`` blocks of ``keys`` are in memory."""
        if blocks <= 0:
            return None
        lease = self.leases.hold(namespace, keys, in_memory, now)
        slots = self._allocate(namespace, blocks)
        if not slots:
            self.leases.release([lease])
            return None
        generation = 1 + next(self._generations) % (2**32 - 1)
        reservation = Reservation(namespace, keys, first, slots, lease, generation)
        self._reserved[slots[0]] = reservation
        return reservation

    def fill(self, reservation: Reservation, blocks: int, now: float, recompute_s: float) -> None:
        """End a reservation of whose blocks the first ``blocks`` are whole in their slots."""
        del self._reserved[reservation.slots[0]]
        # First, for the new blocks are appended to a node only where it is not leased.
        self.leases.release([reservation.lease])
        whole = reservation.slots[:blocks]
        if whole:
            self._publish(reservation, whole, now, recompute_s)
        self.arena.free(reservation.slots[blocks:])

    def cancel(self, reservation: Reservation, *, ended: bool = True) -> None:
        """``ended``: nobody writes to its slots any more."""
        if not ended:
            self.arena.distrust(reservation.slots)
        del self._reserved[reservation.slots[0]]
        self.arena.free(reservation.slots)
        self.leases.release([reservation.lease])

    def held_bytes(self, namespaces: set[bytes]) -> int:
        """Bytes of the namespaces' slots, the reserved ones included."""
        held = {name: self.index.stats(name).in_memory for name in namespaces}
        for reservation in self._reserved.values():
            if reservation.namespace in held:
                held[reservation.namespace] += len(reservation.slots)
        return sum(blocks * self.spaces.slot_bytes(name) for name, blocks in held.items())

    def remove(self, namespace: bytes, keys: bytes) -> int:
        """Forget the last block of a chain, and all below; returns the slots that became free."""
        freed = self.index.remove(namespace, keys, len(keys) // KEY_BYTES - 1)
        self.arena.free(freed.slots)
        return len(freed.slots)

    def remove_corrupt(self, namespace: bytes, keys: bytes, now: float) -> int:
        """Check the last block of a chain, and :meth:`remove` it if it is damaged."""
        blocks = len(keys) // KEY_BYTES
        lease = self.leases.give(namespace, keys, blocks, blocks - 1, now, math.inf)
        # A reader that outlived its lease has read another block's bytes. This block may be whole,
        # or only on SSD, and is checked when it comes back.
        if lease is None:
            return 0
        self.leases.release([lease.id])
        (slot,) = lease.slots
        layout = self.spaces[namespace].layout
        if layout.check(
            self.arena.view(slot, layout.slot_bytes), seed(namespace, keys[-KEY_BYTES:])
        ):
            return 0
        # A leased slot stays allocated, and after a crash its header would bring the block back.
        self.arena.retract(slot)
        self.corrupt_blocks += 1
        return self.remove(namespace, keys)

    def _found(self) -> dict[BlockHeader, int]:
        """The slot of each block of a known namespace; other published slots are freed."""
        found: dict[BlockHeader, int] = {}
        lost: list[int] = []
        for slot, header in list(self.arena.headers()):
            known = header.namespace in self.spaces and header not in found
            size = self.arena.slot_bytes(slot)
            if known and self.spaces.slot_bytes(header.namespace) == size:
                found[header] = slot
            else:
                lost.append(slot)
        self.arena.free(lost)
        return found

    def _publish(
        self, reservation: Reservation, slots: list[int], now: float, recompute_s: float
    ) -> None:
        namespace, keys, first = reservation.namespace, reservation.keys, reservation.first
        unneeded = set(self.index.insert(namespace, keys, first, slots, now, recompute_s))
        for position, slot in enumerate(slots, first):
            if slot not in unneeded:
                header = header_at(namespace, keys, position)
                self.arena.publish(slot, header, reservation.generation)
        self.arena.free(unneeded)

    def _allocate(self, namespace: bytes, blocks: int) -> list[int]:
        """Up to ``blocks`` slots: within the quota, of free memory first, then by eviction."""
        size = self.spaces.slot_bytes(namespace)
        blocks = self._within_quota(namespace, blocks)
        slots = self.arena.allocate(size, blocks)
        while len(slots) < blocks and self._below_its_share(size) and self._take_extent(size):
            slots += self.arena.allocate(size, blocks - len(slots))
        if len(slots) < blocks:
            self._evict(blocks - len(slots), self.spaces.of_slot_bytes(size))
            slots += self.arena.allocate(size, blocks - len(slots))
        return slots

    def _within_quota(self, namespace: bytes, blocks: int) -> int:
        """Of ``blocks`` blocks, as many as fit the model's quota once its others are evicted."""
        model = self.spaces[namespace].model
        quota = self._quotas.get(model)
        if quota is None:
            return blocks
        size = self.spaces.slot_bytes(namespace)
        own = self.spaces.of_model(model)
        blocks = min(blocks, quota // size)
        while (over := self.held_bytes(own) + blocks * size - quota) > 0:
            if not self._evict(-(-over // size), own):
                break
        return max(0, min(blocks, (quota - self.held_bytes(own)) // size))

    def _evict(self, blocks: int, within: set[bytes]) -> int:
        slots = self.index.evict(blocks, within).slots
        self.arena.free(slots)
        return len(slots)

    def _below_its_share(self, slot_bytes: int) -> bool:
        """Whether blocks of this size have fewer extents than an equal share of all."""
        usage = self.arena.usage()
        sizes = usage.keys() | {slot_bytes}
        total = sum(of.extents for of in usage.values())
        mine = usage[slot_bytes].extents if slot_bytes in usage else 0
        return mine + 1 <= total // len(sizes)

    def _take_extent(self, slot_bytes: int) -> bool:
        """Give an extent back to the pool, of the size that has most; False if none can go."""
        usage = self.arena.usage()
        usage.pop(slot_bytes, None)
        donor = max(usage, key=lambda size: usage[size].extents)
        freed = self.index.reclaim(self.arena.slots_by_extent(donor))
        if freed is None:
            return False
        self.arena.free(freed.slots)
        return True
