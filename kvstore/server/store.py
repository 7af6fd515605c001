"""The store of a node: the index, the arena and the SSD tier kept in step, for one thread.

Engines copy blocks in and out of the arena themselves. Here is decided which slots they may write,
which blocks they find, what leaves memory, and what goes to SSD and comes back; the copies to and
from SSD run in threads, and :meth:`BlockStore.tick` takes in what they finished.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loomserve.kvstore.index.demotion import Demotion
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.index.recovery import chain_runs
from loomserve.kvstore.server.protocol import (
    WRITE_S,
    Abandon,
    Commit,
    Corrupt,
    Done,
    Flush,
    Found,
    Inspect,
    Lookup,
    ModelUsage,
    Pin,
    Refused,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    StoreUsage,
)
from loomserve.kvstore.server.slots import encode_slots
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockHeader, BlockLayout, seal, seed, unseal
from loomserve.kvstore.storage.ssd import SsdFullError, SsdTier

_logger = logging.getLogger(__name__)

_READERS = 4
_NO_PARENT = bytes(KEY_BYTES)
# Blocks are copied to SSD while this share of the arena is used, so that evicting them is free.
_WRITE_BEHIND_ABOVE = 0.5
_WRITE_BEHIND_BLOCKS = 16
# Looking for blocks to copy passes over all; so long after one found none, or the SSD took none.
_WRITE_BEHIND_PAUSE_S = 1.0
_SSD_FAILED_PAUSE_S = 30.0
# For blocks whose engine did not live to say it: a prefill of 1,000 tokens a second.
_UNKNOWN_RECOMPUTE_S = 0.03
# Until reads have been timed.
_FIRST_GUESS_BYTES_PER_S = 5e8
_SMOOTHING = 0.2
# Below it, what a clock tells of a read is chance.
_SHORTEST_READ_S = 1e-3


@dataclass(frozen=True)
class Space:
    """What a namespace's blocks are."""

    model: str
    layout: BlockLayout


@dataclass(frozen=True)
class Room:
    """Slots for blocks ``[first, first + len(slots))`` of a chain.

    ``lease`` is on what the chain has in memory before them: were it evicted to make this very
    room, the new blocks would be of no use. 0 where there is nothing.
    """

    namespace: bytes
    keys: bytes
    first: int
    slots: list[int]
    lease: int


@dataclass(frozen=True)
class Writer:
    """Room given out to an engine."""

    room: Room
    expires_at: float


@dataclass(frozen=True)
class Promotion:
    """Blocks on their way from these locations on SSD into slots, in parts side by side.

    Each part tells the number of its first block that is not whole, or of all blocks there are.
    """

    room: Room
    locations: list[int]
    began_at: float
    parts: list[Future[int]]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


class Written(NamedTuple):
    """The locations of each demotion's blocks, as many as the SSD took before it was full, or
    failed."""

    locations: list[list[int]]
    full: bool = False
    failed: bool = False


@dataclass(frozen=True)
class WriteBehind:
    """Leased blocks on their way to SSD."""

    demotions: list[Demotion]
    leases: list[int]
    done: Future[Written]


class BlockStore:
    """Answers requests one at a time; ``now`` is in seconds of a clock that never goes back.

    ``spaces_file`` keeps what the namespaces mean, which headers do not say: JSON, then a checksum,
    since one wrong digit there would have a model's blocks refused for good. ``quotas`` bounds the
    bytes a model may hold in memory; a model that is not named may hold all. ``readers`` and
    ``ssd_writer`` run the copies from and to SSD, the latter one after the other.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        index: Index,
        ssd: SsdTier | None,
        spaces_file: Path,
        quotas: Mapping[str, int],
        readers: Executor | None = None,
        ssd_writer: Executor | None = None,
    ) -> None:
        self._arena = arena
        self._index = index
        self._ssd = ssd
        self._spaces_file = spaces_file
        self._quotas = quotas
        self._spaces: dict[bytes, Space] = {}
        # An engine that outlives a store must not name another's lease or writer to the next one.
        self._epoch = secrets.randbits(61)
        self._writers: dict[int, Writer] = {}
        self._writer_ids = count(self._epoch + 1)
        self._being_written: dict[bytes, set[bytes]] = defaultdict(set)
        self._pins: dict[tuple[bytes, bytes], bytes] = {}
        self._promotions: dict[tuple[bytes, bytes], Promotion] = {}
        self._writing: WriteBehind | None = None
        self._write_behind_at = 0.0
        self._corrupt = 0
        self._ssd_bytes_per_s = _FIRST_GUESS_BYTES_PER_S
        if readers is None:
            readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-ssd-read")
        if ssd_writer is None:
            ssd_writer = ThreadPoolExecutor(1, thread_name_prefix="kv-ssd-write")
        self._readers, self._ssd_writer = readers, ssd_writer
        self._answers: dict[type[Any], Callable[[Any, float], Reply]] = {
            Lookup: self._lookup,
            Reserve: self._reserve,
            Commit: self._commit,
            Abandon: self._abandon,
            Release: self._release,
            Corrupt: self._forget_corrupt,
            Pin: self._pin,
            Flush: self._flush,
            Inspect: self._inspect,
        }

    def answer(self, request: Request, now: float) -> Reply:
        """Carry a request out."""
        if len(getattr(request, "keys", b"")) % KEY_BYTES:
            return Refused(f"keys are {KEY_BYTES} bytes each")
        return self._answers[type(request)](request, now)

    # Engines

    def _add_space(self, namespace: bytes, space: Space) -> str | None:
        known = self._spaces.get(namespace)
        if known is not None and known.layout != space.layout:
            return f"namespace {namespace.hex()} is known with blocks of another shape"
        if space.layout.slot_bytes + 4096 > self._arena.extent_bytes:
            return (
                f"a KV block of model {space.model!r} has {space.layout.block_bytes} bytes, more "
                f"than the {self._arena.extent_bytes} of an extent: give the store more memory"
            )
        if known is None:
            self._index.add_namespace(namespace, space.layout.block_bytes)
            self._spaces[namespace] = space
        return None

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
            lease = self._index.lease(
                namespace, keys, match.in_memory, request.skip, now, request.lease_s
            )
        ready_s = 0.0
        if request.promote and match.resident > match.in_memory:
            ready_s = self._promote(namespace, keys[: match.resident * KEY_BYTES], now)
        return Found(
            in_memory=match.in_memory,
            resident=match.resident,
            lease=self._epoch + lease.id if lease else 0,
            slots=encode_slots(lease.slots) if lease else b"",
            ready_s=ready_s,
        )

    def _reserve(self, request: Reserve, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        known = len(self._spaces)
        layout = BlockLayout(request.layers, request.layer_bytes)
        problem = self._add_space(namespace, Space(request.model, layout))
        if problem is not None:
            return Refused(problem)
        if len(self._spaces) > known:
            self._keep_spaces()
        first = in_memory = self._index.match(namespace, keys).in_memory
        others = self._being_written[namespace]
        blocks = len(keys) // KEY_BYTES
        while first < blocks and _key(keys, first) in others:
            first += 1
        room = self._make_room(namespace, keys, in_memory, first, blocks - first, now)
        if room is None:
            return Reserved(first, b"", 0)
        writer = next(self._writer_ids)
        self._writers[writer] = Writer(room, now + WRITE_S)
        others.update(_keys_of(room))
        return Reserved(first, encode_slots(room.slots), writer)

    def _commit(self, request: Commit, now: float) -> Reply:
        room = self._end_writer(request.writer)
        if room is None:
            return Refused("this write took too long and was given up")
        # First, for the new blocks are appended to a node only where it is not leased.
        self._let_go(room.lease)
        self._insert(room, room.slots, now, request.recompute_s)
        # What came before may have been found corrupt meanwhile, and the new blocks are gone too.
        there = self._index.match(room.namespace, room.keys).in_memory
        if request.keep_s and there:
            self._index.lease(room.namespace, room.keys, there, 0, now, request.keep_s)
        return Done(len(room.slots))

    def _abandon(self, request: Abandon, now: float) -> Reply:
        room = self._end_writer(request.writer)
        if room is not None:
            self._arena.free(room.slots)
            self._let_go(room.lease)
        return Done()

    def _end_writer(self, id_: int) -> Room | None:
        writer = self._writers.pop(id_, None)
        if writer is None:
            return None
        self._being_written[writer.room.namespace].difference_update(_keys_of(writer.room))
        return writer.room

    def _insert(self, room: Room, slots: Sequence[int], now: float, recompute_s: float) -> None:
        """The first ``slots`` of the room hold their blocks, whole."""
        unneeded = set(
            self._index.insert(room.namespace, room.keys, room.first, slots, now, recompute_s)
        )
        for position, slot in enumerate(slots, room.first):
            if slot not in unneeded:
                self._arena.publish(slot, _header(room.namespace, room.keys, position))
        self._arena.free(unneeded)

    def _release(self, request: Release, now: float) -> Reply:
        for lease in request.leases:
            self._let_go(lease - self._epoch)
        return Done(len(request.leases))

    def _forget_corrupt(self, request: Corrupt, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        blocks = len(keys) // KEY_BYTES
        if not blocks or namespace not in self._spaces:
            return Done()
        slot = self._slot_of(namespace, keys, now)
        layout = self._spaces[namespace].layout
        # Whoever outlived his lease has read what another wrote there; the block may be well, or
        # on SSD only, from where it is checked on its way back.
        if slot is None or layout.check(
            self._arena.view(slot, layout.slot_bytes), seed(namespace, keys[-KEY_BYTES:])
        ):
            return Done()
        # While it is leased it stays allocated, and a crash would bring it back.
        self._arena.retract(slot)
        self._corrupt += 1
        freed = self._index.remove(namespace, keys, blocks - 1)
        self._arena.free(freed.slots)
        return Done(len(freed.slots))

    def _slot_of(self, namespace: bytes, keys: bytes, now: float) -> int | None:
        """The last block's slot; None if it is not in memory."""
        blocks = len(keys) // KEY_BYTES
        lease = self._index.lease(namespace, keys, blocks, blocks - 1, now, math.inf)
        if lease is None:
            return None
        self._let_go(lease.id)
        return lease.slots[0]

    # Operators

    def _pin(self, request: Pin, now: float) -> Reply:
        if request.namespace not in self._spaces:
            return Done()
        chain = (request.namespace, request.keys[-KEY_BYTES:])
        pinned = self._pins.pop(chain, b"")
        # Another chain may have the same blocks in memory, and pinned.
        if pinned and pinned not in self._pins.values():
            self._index.unpin(request.namespace, pinned, len(pinned) // KEY_BYTES)
        blocks = self._index.match(request.namespace, request.keys).in_memory
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
        return StoreUsage(
            capacity_bytes=self._arena.capacity_bytes,
            used_bytes=self._used_bytes(),
            ssd_capacity_bytes=self._ssd.capacity_bytes if self._ssd else 0,
            ssd_used_bytes=self._ssd.used_bytes if self._ssd else 0,
            leases=leases,
            writers=len(self._writers),
            corrupt_blocks=self._corrupt,
            models=[models[name] for name in sorted(models)],
        )

    def _used_bytes(self) -> int:
        return sum(size * of.allocated for size, of in self._arena.usage().items())

    # Room

    def _make_room(
        self, namespace: bytes, keys: bytes, in_memory: int, first: int, blocks: int, now: float
    ) -> Room | None:
        """Slots for as many of ``blocks`` blocks from ``first`` on as can be had, if any."""
        if blocks <= 0:
            return None
        lease = self._hold(namespace, keys, in_memory, now)
        slots = self._allocate(self._spaces[namespace], blocks, now)
        if not slots:
            self._let_go(lease)
            return None
        return Room(namespace, keys, first, slots, lease)

    def _hold(self, namespace: bytes, keys: bytes, blocks: int, now: float) -> int:
        """Lease the first ``blocks`` blocks, which are in memory, until :meth:`_let_go`."""
        if not blocks:
            return 0
        lease = self._index.lease(namespace, keys, blocks, blocks - 1, now, math.inf)
        assert lease is not None
        return lease.id

    def _let_go(self, lease: int) -> None:
        self._arena.free(self._index.release(lease))

    def _allocate(self, space: Space, blocks: int, now: float) -> list[int]:
        """As many of so many slots as can be had, evicting what is worth least."""
        size = space.layout.slot_bytes
        blocks = self._within_quota(space, blocks, now)
        slots = self._arena.allocate(size, blocks)
        while len(slots) < blocks and self._below_its_share(size) and self._take_extent(size):
            slots += self._arena.allocate(size, blocks - len(slots))
        if len(slots) < blocks:
            same_size = self._named(lambda of: of.layout.slot_bytes == size)
            self._evict(blocks - len(slots), same_size, now)
            slots += self._arena.allocate(size, blocks - len(slots))
        return slots

    def _within_quota(self, space: Space, blocks: int, now: float) -> int:
        """How many of so many blocks the model may have beside those that cannot be evicted."""
        quota = self._quotas.get(space.model)
        if quota is None:
            return blocks
        size = space.layout.slot_bytes
        own = self._named(lambda of: of.model == space.model)
        blocks = min(blocks, quota // size)
        while (over := self._held_bytes(own) + blocks * size - quota) > 0:
            if not self._evict(-(-over // size), own, now):
                break
        return max(0, min(blocks, (quota - self._held_bytes(own)) // size))

    def _evict(self, blocks: int, within: set[bytes], now: float) -> int:
        slots = self._index.evict(blocks, now, within=within).slots
        self._arena.free(slots)
        return len(slots)

    def _named(self, fits: Callable[[Space], bool]) -> set[bytes]:
        return {name for name, space in self._spaces.items() if fits(space)}

    def _held_bytes(self, namespaces: set[bytes]) -> int:
        """What namespaces have in memory, and what is on its way there."""
        held = {name: self._index.stats(name).in_memory for name in namespaces}
        for room in self._rooms():
            if room.namespace in held:
                held[room.namespace] += len(room.slots)
        return sum(blocks * self._spaces[name].layout.slot_bytes for name, blocks in held.items())

    def _rooms(self) -> Iterator[Room]:
        yield from (writer.room for writer in self._writers.values())
        yield from (promotion.room for promotion in self._promotions.values())

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

    # SSD

    def _promote(self, namespace: bytes, keys: bytes, now: float) -> float:
        """Begin to read into memory what of a resident chain is on SSD only.

        Returns:
            Seconds until it should be there; 0 where nothing comes.
        """
        assert self._ssd is not None
        first = self._index.match(namespace, keys).in_memory
        start = (namespace, _key(keys, first))
        if start not in self._promotions:
            locations = self._index.locations(namespace, keys, first)
            room = self._make_room(namespace, keys, first, first, len(locations), now)
            if room is None:
                return 0.0
            blocks = len(room.slots)
            size = -(-blocks // _READERS)
            parts = [
                self._readers.submit(self._read, room, locations, range(at, min(at + size, blocks)))
                for at in range(0, blocks, size)
            ]
            self._promotions[start] = Promotion(room, locations, now, parts)
        slot_bytes = self._spaces[namespace].layout.slot_bytes
        return len(self._promotions[start].room.slots) * slot_bytes / self._ssd_bytes_per_s

    def _read(self, room: Room, locations: list[int], part: range) -> int:
        """In a thread: a part of a promotion."""
        assert self._ssd is not None
        layout = self._spaces[room.namespace].layout
        for at in part:
            key = _key(room.keys, room.first + at)
            view = self._arena.view(room.slots[at], layout.slot_bytes)
            if not self._ssd.read(locations[at], view, room.namespace, key):
                return at
            # It may have been bad in memory already when it was written.
            if not layout.check(view, seed(room.namespace, key)):
                return at
        return len(room.slots)

    def tick(self, now: float) -> None:
        """Take in what threads finished, end what expired, and write behind."""
        self._arena.free(self._index.expire(now))
        for id_ in [id_ for id_, writer in self._writers.items() if writer.expires_at <= now]:
            self._abandon(Abandon(id_), now)
        for start in [start for start, job in self._promotions.items() if job.done()]:
            self._promoted(self._promotions.pop(start), now)
        if self._writing is not None and self._writing.done.done():
            job, self._writing = self._writing, None
            self._written(job, now)
        filling = self._used_bytes() > _WRITE_BEHIND_ABOVE * self._arena.capacity_bytes
        idle = self._writing is None and now >= self._write_behind_at
        if self._ssd is not None and filling and idle:
            self._write_behind(now)

    @property
    def busy(self) -> bool:
        """Whether threads are at work, whose results :meth:`tick` awaits."""
        return bool(self._promotions or self._writing)

    def _promoted(self, job: Promotion, now: float) -> None:
        room = job.room
        good = min(part.result() for part in job.parts)
        self._let_go(room.lease)
        if good:
            read = good * self._spaces[room.namespace].layout.slot_bytes
            bytes_per_s = read / max(now - job.began_at, _SHORTEST_READ_S)
            self._ssd_bytes_per_s += _SMOOTHING * (bytes_per_s - self._ssd_bytes_per_s)
            self._insert(room, room.slots[:good], now, _UNKNOWN_RECOMPUTE_S)
        self._arena.free(room.slots[good:])
        if good < len(room.slots):
            bad = job.locations[good]
            # Else its segment was dropped meanwhile.
            chain = room.keys[: (room.first + good + 1) * KEY_BYTES]
            if self._index.locations(room.namespace, chain, room.first + good) == [bad]:
                self._corrupt += 1
            self._index.drop_ssd([bad])

    def _write_behind(self, now: float) -> None:
        demotions = self._index.demotion_candidates(_WRITE_BEHIND_BLOCKS, now)
        if not demotions:
            self._write_behind_at = now + _WRITE_BEHIND_PAUSE_S
            return
        leases = [
            self._hold(demotion.namespace, demotion.keys, len(demotion.keys) // KEY_BYTES, now)
            for demotion in demotions
        ]
        done = self._ssd_writer.submit(self._write, demotions)
        self._writing = WriteBehind(demotions, leases, done)

    def _write(self, demotions: list[Demotion]) -> Written:
        """In a thread."""
        assert self._ssd is not None
        locations: list[list[int]] = []
        for demotion in demotions:
            locations.append([])
            slot_bytes = self._spaces[demotion.namespace].layout.slot_bytes
            for position, slot in enumerate(demotion.slots, demotion.first):
                header = _header(demotion.namespace, demotion.keys, position)
                try:
                    location = self._ssd.write(header, self._arena.view(slot, slot_bytes))
                except SsdFullError:
                    return Written(locations, full=True)
                except OSError as error:
                    _logger.warning("cannot keep KV blocks on SSD: %s", error)
                    return Written(locations, failed=True)
                locations[-1].append(location)
        return Written(locations)

    def _written(self, job: WriteBehind, now: float) -> None:
        for lease in job.leases:
            self._let_go(lease)
        written = job.done.result()
        for demotion, locations in zip(job.demotions, written.locations, strict=False):
            self._index.insert_ssd(
                *(demotion.namespace, demotion.keys, demotion.first, locations),
                now,
                _UNKNOWN_RECOMPUTE_S,
            )
        freed = written.full and self._free_ssd()
        if written.failed or (written.full and not freed):
            self._write_behind_at = now + _SSD_FAILED_PAUSE_S

    def _free_ssd(self) -> bool:
        """Drop the oldest segment; False if that makes no room."""
        assert self._ssd is not None
        # Others may have filled the disk.
        used = self._ssd.used_bytes
        try:
            self._index.drop_ssd(self._ssd.drop_oldest_segment())
        except OSError as error:
            _logger.warning("cannot make room for KV blocks on SSD: %s", error)
        return self._ssd.used_bytes < used

    # Crashes

    def recover(self, now: float) -> None:
        """Rebuild the index from the arena's headers and the SSD's."""
        for name, space in _read_spaces(self._spaces_file).items():
            self._add_space(bytes.fromhex(name), space)
        in_memory: dict[BlockHeader, int] = {}
        lost: list[int] = []
        for slot, header in list(self._arena.headers()):
            known = self._spaces.get(header.namespace)
            fits = known is not None and known.layout.slot_bytes == self._arena.slot_bytes(slot)
            if fits and header not in in_memory:
                in_memory[header] = slot
            else:
                lost.append(slot)
        self._arena.free(lost)
        on_ssd = {
            entry.header: entry.location
            for entry in (self._ssd.entries() if self._ssd else ())
            if entry.header.namespace in self._spaces
        }
        everywhere = [*in_memory, *on_ssd]
        reached: set[int] = set()
        for run in chain_runs(in_memory, in_memory):
            self._arena.free(self._index.insert(*run, now, _UNKNOWN_RECOMPUTE_S))
            reached.update(run.places)
        self._arena.free(set(in_memory.values()) - reached)
        for run in chain_runs(on_ssd, everywhere):
            self._index.insert_ssd(*run, now, _UNKNOWN_RECOMPUTE_S)

    def _keep_spaces(self) -> None:
        text = msgspec.json.encode({name.hex(): space for name, space in self._spaces.items()})
        fresh = self._spaces_file.with_suffix(f".{os.getpid()}")
        try:
            fresh.write_bytes(seal(text, 0))
            fresh.replace(self._spaces_file)
        except OSError as error:
            _logger.warning("KV blocks will not survive a crash of their store: %s", error)

    def close(self) -> None:
        """Wait for the copies under way; the arena and the SSD stay as they are."""
        self._readers.shutdown(cancel_futures=True)
        self._ssd_writer.shutdown(cancel_futures=True)
        if self._ssd is not None:
            self._ssd.close()
        self._arena.close()


def _read_spaces(file: Path) -> dict[str, Space]:
    # Without it, blocks cannot be told apart: they count as never saved.
    try:
        text = unseal(file.read_bytes(), 0)
        return msgspec.json.decode(text or b"{}", type=dict[str, Space])
    except (OSError, msgspec.DecodeError):
        return {}


def _keys_of(room: Room) -> list[bytes]:
    """Of the blocks that it is for."""
    return [_key(room.keys, room.first + at) for at in range(len(room.slots))]


def _key(keys: bytes, position: int) -> bytes:
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


def _header(namespace: bytes, keys: bytes, position: int) -> BlockHeader:
    parent = _key(keys, position - 1) if position else _NO_PARENT
    return BlockHeader(namespace, _key(keys, position), parent, position)
