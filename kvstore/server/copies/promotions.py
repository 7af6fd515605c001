"""Promotion of blocks from SSD into memory, by reader threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.server.allocator import UNKNOWN_RECOMPUTE_S, Allocator, Reservation
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import seed
from loomserve.kvstore.storage.ssd import SsdTier

_READERS = 4
# The rate until reads have been timed.
_FIRST_GUESS_BYTES_PER_S = 5e8
_SMOOTHING = 0.2
# A measured time below this is noise.
_SHORTEST_READ_S = 1e-3


@dataclass(frozen=True)
class _Promotion:
    """A read of blocks from their locations into reserved slots, in parts side by side.

    The result of a part is the number of its first block that is not whole, or of all blocks.
    """

    reservation: Reservation
    locations: Sequence[int]
    began_at: float
    parts: Sequence[Future[int]]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


class Promotions:
    """Reads from SSD under way. A chain's blocks are read once, whoever else asks for them."""

    def __init__(
        self,
        ssd: SsdTier,
        index: Index,
        arena: ArenaOwner,
        spaces: Spaces,
        allocator: Allocator,
        readers: Executor | None = None,
    ) -> None:
        self._ssd = ssd
        self._index = index
        self._arena = arena
        self._spaces = spaces
        self._allocator = allocator
        if readers is None:
            readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-ssd-read")
        self._readers = readers
        # By namespace and the key of their first block.
        self._reads: dict[tuple[bytes, bytes], _Promotion] = {}
        self._bytes_per_s = _FIRST_GUESS_BYTES_PER_S
        self.corrupt_blocks = 0
        """Blocks that were not whole on SSD, since the start."""

    @property
    def busy(self) -> bool:
        return bool(self._reads)

    def begin(self, namespace: bytes, keys: bytes, now: float) -> float:
        """Begin to read what of a chain that is resident is not in memory.

        Returns:
            Seconds until it should be there; 0 where memory has no room for it.
        """
        first = self._index.match(namespace, keys).in_memory
        start = (namespace, key_at(keys, first))
        if start not in self._reads:
            locations = self._index.locations(namespace, keys, first)
            reservation = self._allocator.reserve(
                namespace, keys, first, first, len(locations), now
            )
            if reservation is None:
                return 0.0
            self._reads[start] = _Promotion(
                reservation, locations, now, self._submit(reservation, locations)
            )
        blocks = len(self._reads[start].reservation.slots)
        return blocks * self._spaces.slot_bytes(namespace) / self._bytes_per_s

    def take_in(self, now: float) -> None:
        """Put what was read into the index."""
        for start in [start for start, read in self._reads.items() if read.done()]:
            self._finish(self._reads.pop(start), now)

    def close(self) -> None:
        """Wait for the reads that have begun."""
        self._readers.shutdown(cancel_futures=True)

    def _submit(self, reservation: Reservation, locations: Sequence[int]) -> list[Future[int]]:
        blocks = len(reservation.slots)
        size = -(-blocks // _READERS)
        return [
            self._readers.submit(
                self._read, reservation, locations, range(at, min(at + size, blocks))
            )
            for at in range(0, blocks, size)
        ]

    def _read(self, reservation: Reservation, locations: Sequence[int], part: range) -> int:
        """In a thread: a part of a promotion."""
        namespace = reservation.namespace
        layout = self._spaces[namespace].layout
        for at in part:
            key = key_at(reservation.keys, reservation.first + at)
            view = self._arena.view(reservation.slots[at], layout.slot_bytes)
            if not self._ssd.read(locations[at], view, namespace, key):
                return at
            # It may have been bad in memory already when it was written.
            if not layout.check(view, seed(namespace, key)):
                return at
        return len(reservation.slots)

    def _finish(self, read: _Promotion, now: float) -> None:
        reservation = read.reservation
        good = min(part.result() for part in read.parts)
        if good:
            self._time(good * self._spaces.slot_bytes(reservation.namespace), now - read.began_at)
        self._allocator.fill(reservation, good, now, UNKNOWN_RECOMPUTE_S)
        if good < len(reservation.slots):
            self._forget(reservation, reservation.first + good, read.locations[good])

    def _time(self, size: int, took_s: float) -> None:
        bytes_per_s = size / max(took_s, _SHORTEST_READ_S)
        self._bytes_per_s += _SMOOTHING * (bytes_per_s - self._bytes_per_s)

    def _forget(self, reservation: Reservation, position: int, location: int) -> None:
        """Drop the location of a block that was not whole there."""
        chain = reservation.keys[: (position + 1) * KEY_BYTES]
        # If the block has another location by now, or none, its segment was dropped meanwhile.
        if self._index.locations(reservation.namespace, chain, position) == [location]:
            self.corrupt_blocks += 1
        self._index.drop_ssd([location])
