"""Copies of blocks into memory: threads fill reserved slots, and then the index learns of them.

Promotions are those from SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.server.grants import Reservation
from loomserve.kvstore.server.memory_tier import UNKNOWN_RECOMPUTE_S, MemoryTier
from loomserve.kvstore.storage.checksum import seed
from loomserve.kvstore.storage.ssd import SsdTier


class Copy(NamedTuple):
    """Blocks on their way into reserved slots, in parts side by side. The result of a part is the
    number of its first block that is not whole, or of all blocks."""

    reservation: Reservation
    ready_at: float
    recompute_s: float
    parts: Sequence[Future[int]]
    ended: Callable[[int, float], None]
    """Gets the number of whole blocks, from the first on, and the time."""

    @property
    def start(self) -> tuple[bytes, bytes]:
        reservation = self.reservation
        return reservation.namespace, key_at(reservation.keys, reservation.first)


class CopyQueue:
    """Copies under way. A chain's blocks are copied once, however many ask for them."""

    def __init__(self, memory: MemoryTier, threads: Executor) -> None:
        self._memory = memory
        self._threads = threads
        self._copies: dict[tuple[bytes, bytes], Copy] = {}

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    def under_way(self, namespace: bytes, key: bytes) -> Copy | None:
        return self._copies.get((namespace, key))

    def begin(
        self,
        reservation: Reservation,
        parts: Sequence[Callable[[], int]],
        ended: Callable[[int, float], None],
        *,
        recompute_s: float,
        ready_at: float,
    ) -> Copy:
        futures = [self._threads.submit(part) for part in parts]
        copy = Copy(reservation, ready_at, recompute_s, futures, ended)
        self._copies[copy.start] = copy
        return copy

    def take_in(self, now: float) -> None:
        """Put what was copied into the index."""
        for copy in list(self._copies.values()):
            if all(part.done() for part in copy.parts):
                del self._copies[copy.start]
                whole = min(part.result() for part in copy.parts)
                self._memory.fill(copy.reservation, whole, now, copy.recompute_s)
                copy.ended(whole, now)

    def close(self) -> None:
        """Wait for the copies that have begun."""
        self._threads.shutdown(cancel_futures=True)


_READERS = 4
# The rate until reads have been timed.
_FIRST_GUESS_BYTES_PER_S = 5e8
_SMOOTHING = 0.2
# A measured time below this is noise.
_SHORTEST_READ_S = 1e-3


class Promotions:
    def __init__(self, ssd: SsdTier, memory: MemoryTier, readers: Executor | None = None) -> None:
        if readers is None:
            readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-ssd-read")
        self.queue = CopyQueue(memory, readers)
        self._ssd = ssd
        self._memory = memory
        self._bytes_per_s = _FIRST_GUESS_BYTES_PER_S
        self.corrupt_blocks = 0
        """Blocks that were not whole on SSD, since the start."""

    def begin(self, namespace: bytes, keys: bytes, now: float) -> float:
        """Begin to read the blocks of a resident chain that are not in memory. Returns seconds
        until it should be there; 0 where memory has no room for it."""
        first = self._memory.index.match(namespace, keys).in_memory
        read = self.queue.under_way(namespace, key_at(keys, first))
        slot_bytes = self._memory.spaces.slot_bytes(namespace)
        if read is None:
            locations = self._memory.index.locations(namespace, keys, first)
            room = self._memory.reserve(namespace, keys, first, first, len(locations), now)
            if room is None:
                return 0.0
            blocks = len(room.slots)
            size = -(-blocks // _READERS)
            read = self.queue.begin(
                room,
                [
                    partial(self._read, room, locations, range(at, min(at + size, blocks)))
                    for at in range(0, blocks, size)
                ],
                partial(self._ended, room, locations, now),
                recompute_s=UNKNOWN_RECOMPUTE_S,
                ready_at=now + blocks * slot_bytes / self._bytes_per_s,
            )
        return len(read.reservation.slots) * slot_bytes / self._bytes_per_s

    def _read(self, reservation: Reservation, locations: Sequence[int], part: range) -> int:
        """In a thread: a part of a promotion."""
        namespace = reservation.namespace
        layout = self._memory.spaces[namespace].layout
        for at in part:
            key = key_at(reservation.keys, reservation.first + at)
            view = self._memory.arena.view(reservation.slots[at], layout.slot_bytes)
            if not self._ssd.read(locations[at], view, namespace, key):
                return at
            # It may have been bad in memory already when it was written.
            if not layout.check(view, seed(namespace, key)):
                return at
        return len(reservation.slots)

    def _ended(
        self,
        reservation: Reservation,
        locations: Sequence[int],
        began_at: float,
        whole: int,
        now: float,
    ) -> None:
        namespace = reservation.namespace
        if whole:
            size = whole * self._memory.spaces.slot_bytes(namespace)
            bytes_per_s = size / max(now - began_at, _SHORTEST_READ_S)
            self._bytes_per_s += _SMOOTHING * (bytes_per_s - self._bytes_per_s)
        if whole == len(reservation.slots):
            return
        # The first block that was not whole there. If it has another location by now, or none, its
        # segment was dropped meanwhile.
        index, position = self._memory.index, reservation.first + whole
        chain = reservation.keys[: (position + 1) * KEY_BYTES]
        if index.locations(namespace, chain, position) == [locations[whole]]:
            self.corrupt_blocks += 1
        index.drop_ssd([locations[whole]])
