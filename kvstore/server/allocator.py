"""Allocation of slots for blocks on their way into memory, from an engine or from SSD."""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from dataclasses import dataclass

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import key_at
from loomserve.kvstore.index.recovery import header_at
from loomserve.kvstore.server.leases import Leases
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner

UNKNOWN_RECOMPUTE_S = 0.03
"""Seconds to compute a block whose engine died before it told: 1,000 tokens a second."""


@dataclass(frozen=True)
class Reservation:
    """Slots for blocks ``[first, first + len(slots))`` of a chain, at least one.

    ``lease`` holds what the chain has in memory before them (0: nothing): were it evicted to make
    this very room, the new blocks would be of no use.
    """

    namespace: bytes
    keys: bytes
    first: int
    slots: list[int]
    lease: int

    def block_keys(self) -> list[bytes]:
        """The keys of the blocks that it is for."""
        return [key_at(self.keys, self.first + at) for at in range(len(self.slots))]


class Allocator:
    """Reserves slots, evicting the least valuable blocks, until they are filled or cancelled.

    ``quotas`` bounds the bytes that a model may hold in memory; a model that is not named may hold
    all. Blocks of different sizes share the arena's extents equally where they compete.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        index: Index,
        spaces: Spaces,
        quotas: Mapping[str, int],
        leases: Leases,
    ) -> None:
        self._arena = arena
        self._index = index
        self._spaces = spaces
        self._quotas = quotas
        self._leases = leases
        # By their first slots.
        self._reserved: dict[int, Reservation] = {}

    def reservations(self) -> ValuesView[Reservation]:
        return self._reserved.values()

    def reserve(
        self, namespace: bytes, keys: bytes, in_memory: int, first: int, blocks: int, now: float
    ) -> Reservation | None:
        """Slots for as many of ``blocks`` blocks from ``first`` on as can be had; None: for none.

        The first ``in_memory`` blocks of ``keys`` are in memory.
        """
        if blocks <= 0:
            return None
        lease = self._leases.hold(namespace, keys, in_memory, now)
        slots = self._allocate(namespace, blocks, now)
        if not slots:
            self._leases.release([lease])
            return None
        reservation = Reservation(namespace, keys, first, slots, lease)
        self._reserved[slots[0]] = reservation
        return reservation

    def fill(self, reservation: Reservation, blocks: int, now: float, recompute_s: float) -> None:
        """End a reservation of whose blocks the first ``blocks`` are whole in their slots."""
        del self._reserved[reservation.slots[0]]
        # First, for the new blocks are appended to a node only where it is not leased.
        self._leases.release([reservation.lease])
        whole = reservation.slots[:blocks]
        if whole:
            self._publish(reservation, whole, now, recompute_s)
        self._arena.free(reservation.slots[blocks:])

    def cancel(self, reservation: Reservation) -> None:
        """End a reservation whose blocks do not come."""
        del self._reserved[reservation.slots[0]]
        self._arena.free(reservation.slots)
        self._leases.release([reservation.lease])

    def held_bytes(self, namespaces: set[bytes]) -> int:
        """Bytes of the namespaces' slots, the reserved ones included."""
        held = {name: self._index.stats(name).in_memory for name in namespaces}
        for reservation in self._reserved.values():
            if reservation.namespace in held:
                held[reservation.namespace] += len(reservation.slots)
        return sum(blocks * self._spaces.slot_bytes(name) for name, blocks in held.items())

    def _publish(
        self, reservation: Reservation, slots: list[int], now: float, recompute_s: float
    ) -> None:
        namespace, keys, first = reservation.namespace, reservation.keys, reservation.first
        unneeded = set(self._index.insert(namespace, keys, first, slots, now, recompute_s))
        for position, slot in enumerate(slots, first):
            if slot not in unneeded:
                self._arena.publish(slot, header_at(namespace, keys, position))
        self._arena.free(unneeded)

    def _allocate(self, namespace: bytes, blocks: int, now: float) -> list[int]:
        """Up to ``blocks`` slots: within the quota, of free memory first, then by eviction."""
        size = self._spaces.slot_bytes(namespace)
        blocks = self._within_quota(namespace, blocks, now)
        slots = self._arena.allocate(size, blocks)
        while len(slots) < blocks and self._below_its_share(size) and self._take_extent(size):
            slots += self._arena.allocate(size, blocks - len(slots))
        if len(slots) < blocks:
            self._evict(blocks - len(slots), self._spaces.of_slot_bytes(size), now)
            slots += self._arena.allocate(size, blocks - len(slots))
        return slots

    def _within_quota(self, namespace: bytes, blocks: int, now: float) -> int:
        """Of ``blocks`` blocks, as many as fit the model's quota once its others are evicted."""
        model = self._spaces[namespace].model
        quota = self._quotas.get(model)
        if quota is None:
            return blocks
        size = self._spaces.slot_bytes(namespace)
        own = self._spaces.of_model(model)
        blocks = min(blocks, quota // size)
        while (over := self.held_bytes(own) + blocks * size - quota) > 0:
            if not self._evict(-(-over // size), own, now):
                break
        return max(0, min(blocks, (quota - self.held_bytes(own)) // size))

    def _evict(self, blocks: int, within: set[bytes], now: float) -> int:
        slots = self._index.evict(blocks, now, within=within).slots
        self._arena.free(slots)
        return len(slots)

    def _below_its_share(self, slot_bytes: int) -> bool:
        """Whether blocks of this size have fewer extents than an equal share of all."""
        usage = self._arena.usage()
        sizes = usage.keys() | {slot_bytes}
        total = sum(of.extents for of in usage.values())
        mine = usage[slot_bytes].extents if slot_bytes in usage else 0
        return mine + 1 <= total // len(sizes)

    def _take_extent(self, slot_bytes: int) -> bool:
        """Give an extent back to the pool, of the size that has most; False if none can go."""
        usage = self._arena.usage()
        usage.pop(slot_bytes, None)
        donor = max(usage, key=lambda size: usage[size].extents)
        freed = self._index.reclaim(self._arena.slots_by_extent(donor))
        if freed is None:
            return False
        self._arena.free(freed.slots)
        return True
