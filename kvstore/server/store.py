"""The store of a node: answers what engines and operators ask, one request at a time.

Engines copy blocks in and out of the arena themselves. The store decides which slots they may
write, which blocks they find, what leaves memory, and what goes to SSD and comes back; the copies
to and from SSD run in threads, and :meth:`BlockStore.tick` takes in what they finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, first_keys
from loomserve.kvstore.server.allocator import Allocator
from loomserve.kvstore.server.leases import Leases
from loomserve.kvstore.server.promotions import Promotions
from loomserve.kvstore.server.protocol import (
    Abandon,
    Commit,
    Corrupt,
    Done,
    Flush,
    Found,
    Inspect,
    Lookup,
    ModelUsage,
    Outdated,
    Pin,
    Refused,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    StoreUsage,
)
from loomserve.kvstore.server.rebuild import rebuild
from loomserve.kvstore.server.slots import encode_slots
from loomserve.kvstore.server.spaces import Space, Spaces
from loomserve.kvstore.server.write_behind import WriteBehind
from loomserve.kvstore.server.writers import Writers
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockLayout, seed
from loomserve.kvstore.storage.ssd import SsdTier

_MOST_PINS = 4096


class BlockStore:
    """Index, arena and SSD tier of a node, kept in step for one thread.

    ``now`` is in seconds of a clock that never goes back. ``spaces_file`` keeps what the
    namespaces mean. ``quotas`` bounds the bytes a model may hold in memory. ``readers`` and
    ``ssd_writer`` run the copies from and to SSD, the latter one after the other.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        index: Index,
        ssd: SsdTier | None,
        spaces_file: Path,
        quotas: Mapping[str, int],
        *,
        readers: Executor | None = None,
        ssd_writer: Executor | None = None,
    ) -> None:
        self._arena = arena
        self._index = index
        self._ssd = ssd
        self._spaces = Spaces(spaces_file, index, arena.extent_bytes)
        self._leases = Leases(index, arena)
        self._writers = Writers()
        self._allocator = Allocator(arena, index, self._spaces, quotas, self._leases)
        self._promotions: Promotions | None = None
        self._write_behind: WriteBehind | None = None
        if ssd is not None:
            self._promotions = Promotions(ssd, index, arena, self._spaces, self._allocator, readers)
            self._write_behind = WriteBehind(
                ssd, index, arena, self._spaces, self._leases, ssd_writer
            )
        self._pins: dict[tuple[bytes, bytes], bytes] = {}
        self._corrupt_blocks = 0
        self._answers: dict[type[Any], Callable[[Any, float], Reply]] = {
            Lookup: self._lookup,
            Reserve: self._reserve,
            Commit: self._commit,
            Outdated: self._forget_outdated,
            Abandon: self._abandon,
            Release: self._release,
            Corrupt: self._forget_corrupt,
            Pin: self._pin,
            Flush: self._flush,
            Inspect: self._inspect,
        }

    def recover(self, now: float) -> None:
        """Take over what an earlier store left in the arena and on SSD."""
        self._spaces.load()
        rebuild(self._index, self._arena, self._ssd, self._spaces, now)

    def answer(self, request: Request, now: float) -> Reply:
        """Carry a request out."""
        if len(getattr(request, "keys", b"")) % KEY_BYTES:
            return Refused(f"keys are {KEY_BYTES} bytes each")
        return self._answers[type(request)](request, now)

    def tick(self, now: float) -> None:
        """Take in what threads finished, end what expired, and write behind."""
        self._leases.expire(now)
        for reservation in self._writers.end_expired(now):
            self._allocator.cancel(reservation)
        if self._promotions is not None:
            self._promotions.take_in(now)
        if self._write_behind is not None:
            self._write_behind.tick(now)

    @property
    def busy(self) -> bool:
        """Whether threads are at work, whose results :meth:`tick` awaits."""
        return any(copies.busy for copies in self._copies())

    def close(self) -> None:
        """Wait for the copies under way; the arena and the SSD stay as they are."""
        for copies in self._copies():
            copies.close()
        if self._ssd is not None:
            self._ssd.close()
        self._arena.close()

    def _copies(self) -> list[Promotions | WriteBehind]:
        """What runs in threads: nothing without SSD."""
        return [copies for copies in (self._promotions, self._write_behind) if copies is not None]

    # Engines

    def _lookup(self, request: Lookup, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        if namespace not in self._spaces:
            return Found(0, 0, 0, b"", 0.0)
        if request.use:
            match = self._index.lookup(namespace, keys, now)
        else:
            match = self._index.match(namespace, keys)
        lease = None
        if match.in_memory > request.skip:
            lease = self._leases.give(
                namespace, keys, match.in_memory, request.skip, now, request.lease_s
            )
            if lease is None:
                # Blocks that nobody keeps there are of no use to the engine.
                return Found(0, 0, 0, b"", 0.0)
        ready_s = 0.0
        if request.promote and self._promotions and match.resident > match.in_memory:
            resident = keys[: match.resident * KEY_BYTES]
            ready_s = self._promotions.begin(namespace, resident, now)
        return Found(
            in_memory=match.in_memory,
            resident=match.resident,
            lease=lease.id if lease else 0,
            slots=encode_slots(lease.slots) if lease else b"",
            ready_s=ready_s,
        )

    def _reserve(self, request: Reserve, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        layout = BlockLayout(request.layers, request.layer_bytes)
        problem = self._spaces.declare(namespace, Space(request.model, layout))
        if problem is not None:
            return Refused(problem)
        in_memory = self._index.match(namespace, keys).in_memory
        first = self._writers.first_unwritten(namespace, keys, in_memory)
        reservation = self._allocator.reserve(
            namespace, keys, in_memory, first, len(keys) // KEY_BYTES - first, now
        )
        if reservation is None:
            return Reserved(first, b"", 0)
        writer = self._writers.begin(reservation, now)
        return Reserved(first, encode_slots(reservation.slots), writer)

    def _commit(self, request: Commit, now: float) -> Reply:
        reservation = self._writers.end(request.writer)
        if reservation is None:
            return Refused("this write took too long and was given up")
        namespace, keys, blocks = reservation.namespace, reservation.keys, len(reservation.slots)
        if len(request.outdated) == KEY_BYTES:
            # First, for the new blocks continue a run only where nothing follows it.
            self._remove_last(namespace, first_keys(keys, reservation.first) + request.outdated)
        self._allocator.fill(reservation, blocks, now, request.recompute_s)
        # If a block before them was found corrupt meanwhile, the new blocks are gone too.
        there = self._index.match(namespace, keys).in_memory
        if request.keep_s and there:
            self._leases.give(namespace, keys, there, 0, now, request.keep_s)
        return Done(blocks)

    def _forget_outdated(self, request: Outdated, now: float) -> Reply:
        if not request.keys or request.namespace not in self._spaces:
            return Done()
        return Done(self._remove_last(request.namespace, request.keys))

    def _remove_last(self, namespace: bytes, keys: bytes) -> int:
        freed = self._index.remove(namespace, keys, len(keys) // KEY_BYTES - 1)
        self._arena.free(freed.slots)
        return len(freed.slots)

    def _abandon(self, request: Abandon, now: float) -> Reply:
        reservation = self._writers.end(request.writer)
        if reservation is not None:
            self._allocator.cancel(reservation)
        return Done()

    def _release(self, request: Release, now: float) -> Reply:
        self._leases.release(request.leases)
        return Done(len(request.leases))

    def _forget_corrupt(self, request: Corrupt, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        blocks = len(keys) // KEY_BYTES
        if not blocks or namespace not in self._spaces:
            return Done()
        slot = self._slot_of(namespace, keys, now)
        layout = self._spaces[namespace].layout
        # A reader that outlived its lease has read another block's bytes. This block may be whole,
        # or only on SSD, and is checked when it comes back.
        if slot is None or layout.check(
            self._arena.view(slot, layout.slot_bytes), seed(namespace, keys[-KEY_BYTES:])
        ):
            return Done()
        # A leased slot stays allocated, and after a crash its header would bring the block back.
        self._arena.retract(slot)
        self._corrupt_blocks += 1
        return Done(self._remove_last(namespace, keys))

    def _slot_of(self, namespace: bytes, keys: bytes, now: float) -> int | None:
        """Slot of the last block of ``keys``; None if it is not in memory."""
        blocks = len(keys) // KEY_BYTES
        lease = self._leases.give(namespace, keys, blocks, blocks - 1, now, math.inf)
        if lease is None:
            return None
        self._leases.release([lease.id])
        return lease.slots[0]

    # Operators

    def _pin(self, request: Pin, now: float) -> Reply:
        if request.namespace not in self._spaces:
            return Done()
        chain = (request.namespace, request.keys[-KEY_BYTES:])
        pinned = self._pins.pop(chain, b"")
        # Another chain may have pinned the same blocks.
        if pinned and pinned not in self._pins.values():
            self._index.unpin(request.namespace, pinned, len(pinned) // KEY_BYTES)
        blocks = self._index.match(request.namespace, request.keys).in_memory
        if request.pinned and len(self._pins) >= _MOST_PINS:
            return Refused(f"{_MOST_PINS} chains are pinned: unpin some")
        if request.pinned and blocks:
            self._index.pin(request.namespace, request.keys, blocks)
            self._pins[chain] = request.keys[: blocks * KEY_BYTES]
        return Done(blocks)

    def _flush(self, request: Flush, now: float) -> Reply:
        blocks = 0
        for namespace, space in self._spaces.items():
            if request.model in ("", space.model):
                freed = self._index.flush(namespace)
                blocks += len(freed.slots)
                self._arena.free(freed.slots)
        return Done(blocks)

    def _inspect(self, request: Inspect, now: float) -> Reply:
        models: dict[str, ModelUsage] = {}
        leases = 0
        for namespace, space in self._spaces.items():
            stats = self._index.stats(namespace)
            leases += stats.leases
            size = space.layout.block_bytes
            so_far = models.get(space.model, ModelUsage(space.model, 0, 0, 0, 0, 0, 0, 0))
            models[space.model] = ModelUsage(
                space.model,
                so_far.blocks_in_memory + stats.in_memory,
                so_far.blocks_on_ssd + stats.on_ssd,
                so_far.bytes_in_memory + stats.in_memory * size,
                so_far.bytes_on_ssd + stats.on_ssd * size,
                so_far.hit_blocks + stats.hits,
                so_far.missed_blocks + stats.misses,
                so_far.evicted_blocks + stats.evictions,
            )
        corrupt_on_ssd = self._promotions.corrupt_blocks if self._promotions else 0
        return StoreUsage(
            capacity_bytes=self._arena.capacity_bytes,
            used_bytes=self._arena.used_bytes,
            ssd_capacity_bytes=self._ssd.capacity_bytes if self._ssd else 0,
            ssd_used_bytes=self._ssd.used_bytes if self._ssd else 0,
            leases=leases,
            writers=len(self._writers),
            corrupt_blocks=self._corrupt_blocks + corrupt_on_ssd,
            models=[models[name] for name in sorted(models)],
        )
