"""Write-behind: copies blocks to SSD, by a thread, before they would be evicted and lost."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.index.recovery import header_at
from loomserve.kvstore.index.selection import Demotion, demotions
from loomserve.kvstore.server.memory_tier import UNKNOWN_RECOMPUTE_S, MemoryTier
from loomserve.kvstore.storage.checksum import PAGE
from loomserve.kvstore.storage.ssd import SsdFullError, SsdTier

_logger = logging.getLogger(__name__)

# Blocks are copied to SSD while more than this share of the arena is used, so eviction is free.
_ABOVE = 0.5
_BATCH_BLOCKS = 16
# Bytes that a full SSD drops at most for each byte that memory evicts. Uses change the order of
# eviction, so more than one; without a bound, hits alone would wear the SSD out.
_DROPPED_PER_EVICTED = 4
# The search for blocks passes over all: seconds until the next one, after one that found none and
# after a copy that the SSD did not take.
_PAUSE_S = 1.0
_FAILED_PAUSE_S = 30.0


class _Written(NamedTuple):
    """Locations of each demotion's blocks, as many as the SSD took before it was full or failed."""

    locations: list[list[int]]
    full: bool = False
    failed: bool = False


class _Batch(NamedTuple):
    demotions: Sequence[Demotion]
    leases: Sequence[int]
    done: Future[_Written]


class WriteBehind:
    """At most one batch of blocks on its way to SSD, in the order in which they would be evicted.

    While there is room, all of them. A full SSD drops its oldest segment, but only for blocks that
    are to be evicted next, as many as take half of it: the other half is for what has been evicted,
    and so blocks are not dropped and written again for ever. One that fails is left alone a while.
    """

    def __init__(self, ssd: SsdTier, memory: MemoryTier, thread: Executor | None = None) -> None:
        self._ssd = ssd
        self._memory = memory
        if thread is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="kv-ssd-write")
        self._thread = thread
        self._batch: _Batch | None = None
        self._not_before = 0.0
        self._full = False
        # Bytes that it held when it was full last; 0: it never was.
        self._held = 0
        self._may_drop = ssd.capacity_bytes // 2
        self._evicted = self._evicted_bytes()

    @property
    def busy(self) -> bool:
        return self._batch is not None

    def begin(self, now: float) -> None:
        """Begin a batch, if none is under way, while memory fills."""
        arena = self._memory.arena
        filling = arena.used_bytes > _ABOVE * arena.capacity_bytes
        if not filling or self._batch is not None or now < self._not_before:
            return
        mirror = max(self._held, self._ssd.used_bytes) // 2 if self._held else sys.maxsize
        order = self._memory.index.order()
        found = demotions(order, _BATCH_BLOCKS, mirror, self._record_bytes)
        if not found or (self._full and not self._earned(mirror)):
            self._not_before = now + _PAUSE_S
            return
        if self._full:
            self._full = False
            if not self._free_ssd():
                self._not_before = now + _FAILED_PAUSE_S
                return
        leases = [
            self._memory.leases.hold(namespace, keys, len(keys) // KEY_BYTES, now)
            for namespace, keys, *_ in found
        ]
        self._batch = _Batch(found, leases, self._thread.submit(self._write, found))

    def close(self) -> None:
        """Wait for the batch that has begun."""
        self._thread.shutdown(cancel_futures=True)

    def _write(self, found: Sequence[Demotion]) -> _Written:
        locations: list[list[int]] = []
        for namespace, keys, first, slots in found:
            locations.append([])
            slot_bytes = self._memory.spaces.slot_bytes(namespace)
            for position, slot in enumerate(slots, first):
                header = header_at(namespace, keys, position)
                try:
                    location = self._ssd.write(header, self._memory.arena.view(slot, slot_bytes))
                except SsdFullError:
                    return _Written(locations, full=True)
                except OSError as error:
                    _logger.warning("cannot keep KV blocks on SSD: %s", error)
                    return _Written(locations, failed=True)
                locations[-1].append(location)
        return _Written(locations)

    def take_in(self, now: float) -> None:
        """Put a batch that is written into the index."""
        batch = self._batch
        if batch is None or not batch.done.done():
            return
        self._batch = None
        self._memory.leases.release(batch.leases)
        written = batch.done.result()
        for (namespace, keys, first, _), locations in zip(
            batch.demotions, written.locations, strict=False
        ):
            self._memory.index.insert_ssd(
                namespace, keys, first, locations, now, UNKNOWN_RECOMPUTE_S
            )
        if written.full:
            self._full, self._held = True, self._ssd.used_bytes
        if written.failed:
            self._not_before = now + _FAILED_PAUSE_S

    def _record_bytes(self, namespace: bytes) -> int:
        return PAGE + self._memory.spaces.slot_bytes(namespace)

    def _evicted_bytes(self) -> int:
        return sum(
            self._memory.index.stats(namespace).evictions * self._record_bytes(namespace)
            for namespace, _ in self._memory.spaces.items()
        )

    def _earned(self, most: int) -> bool:
        """Whether memory has evicted enough for the SSD to drop blocks."""
        before, self._evicted = self._evicted, self._evicted_bytes()
        earned = _DROPPED_PER_EVICTED * (self._evicted - before)
        self._may_drop = min(most, self._may_drop + earned)
        return self._may_drop > 0

    def _free_ssd(self) -> bool:
        """Drop the oldest segment; False if that makes no room."""
        # Others may have filled the disk.
        used = self._ssd.used_bytes
        try:
            self._memory.index.drop_ssd(self._ssd.drop_oldest_segment())
        except OSError as error:
            _logger.warning("cannot make room for KV blocks on SSD: %s", error)
        freed = used - self._ssd.used_bytes
        self._may_drop -= freed
        return freed > 0
