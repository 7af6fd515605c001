"""The store of a node: the index, the arena and the SSD tier kept in step, for one thread.

Engines copy blocks in and out of the arena themselves. Here is decided which slots they may write,
which blocks they find, what leaves memory, and what goes to SSD and comes back; the copies to and
from SSD run in threads, and :meth:`BlockStore.tick` takes in what they finished.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from loomserve.kvstore.arena import ArenaOwner
from loomserve.kvstore.checksum import BlockHeader, BlockLayout
from loomserve.kvstore.demotion import Demotion
from loomserve.kvstore.index import Index
from loomserve.kvstore.protocol import (
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
    Usage,
)
from loomserve.kvstore.radix import KEY_BYTES
from loomserve.kvstore.recovery import runs
from loomserve.kvstore.slots import encode_slots
from loomserve.kvstore.ssd import SsdFullError, SsdTier

_logger = logging.getLogger(__name__)

_READERS = 4
_NO_PARENT = bytes(KEY_BYTES)
# A writer that takes longer has died; what it writes into its slots afterwards fails its checksum.
_WRITE_S = 60.0
# Blocks are copied to SSD while this share of the arena is used, so that evicting them is free.
_WRITE_BEHIND_ABOVE = 0.5
_WRITE_BEHIND_BLOCKS = 16
# For blocks whose engine did not live to say it: a prefill of 1,000 tokens a second.
_UNKNOWN_RECOMPUTE_S = 0.03
# Until reads have been timed.
_FIRST_GUESS_BYTES_PER_S = 5e8
_SMOOTHING = 0.2


@dataclass(frozen=True)
class Space:
    """What a namespace's blocks are."""

    model: str
    layout: BlockLayout


@dataclass(frozen=True)
class Writer:
    """Slots given out for blocks ``[first, first + len(slots))`` of a chain."""

    namespace: bytes
    keys: bytes
    first: int
    slots: list[int]
    expires_at: float


@dataclass(frozen=True)
class Promotion:
    """Blocks on their way from SSD into slots."""

    namespace: bytes
    keys: bytes
    first: int
    slots: list[int]
    done: Future[tuple[int, float]]


@dataclass(frozen=True)
class WriteBehind:
    """Leased blocks on their way to SSD."""

    demotion: Demotion
    lease: int
    done: Future[list[int]]


class BlockStore:
    """Answers requests one at a time; ``now`` is in seconds of a clock that never goes back.

    ``spaces_file`` keeps what the namespaces mean, which headers do not say. ``quotas`` bounds the
    bytes a model may hold in memory; a model that is not named may hold all.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        index: Index,
        ssd: SsdTier | None,
        spaces_file: Path,
        quotas: Mapping[str, int],
    ) -> None:
        self._arena = arena
        self._index = index
        self._ssd = ssd
        self._spaces_file = spaces_file
        self._quotas = quotas
        self._spaces: dict[bytes, Space] = {}
        self._writers: dict[int, Writer] = {}
        self._writer_ids = count(1)
        self._being_written: dict[bytes, set[bytes]] = defaultdict(set)
        self._promotions: list[Promotion] = []
        self._promoting: set[tuple[bytes, bytes]] = set()
        self._writes: list[WriteBehind] = []
        self._corrupt = 0
        self._ssd_bytes_per_s = _FIRST_GUESS_BYTES_PER_S
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-ssd-read")
        self._ssd_writer = ThreadPoolExecutor(1, thread_name_prefix="kv-ssd-write")
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
            self._spaces[namespace] = space
            self._keep_spaces()
        self._index.add_namespace(namespace, space.layout.block_bytes)
        return None

    def _lookup(self, request: Lookup, now: float) -> Reply:
        if request.namespace not in self._spaces:
            return Found(0, 0, 0, b"", 0.0)
        match = self._index.lookup(request.namespace, request.keys, now)
        lease = None
        if match.in_memory > request.skip:
            lease = self._index.lease(
                *(request.namespace, request.keys, match.in_memory, request.skip),
                now,
                request.lease_s,
            )
        ready_s = 0.0
        if request.promote and match.resident > match.in_memory:
            ready_s = self._promote(
                request.namespace, request.keys, match.in_memory, match.resident, now
            )
        return Found(
            in_memory=match.in_memory,
            resident=match.resident,
            lease=lease.id if lease else 0,
            slots=encode_slots(lease.slots) if lease else b"",
            ready_s=ready_s,
        )

    def _reserve(self, request: Reserve, now: float) -> Reply:
        space = Space(request.model, BlockLayout(request.layers, request.layer_bytes))
        problem = self._add_space(request.namespace, space)
        if problem is not None:
            return Refused(problem)
        blocks = len(request.keys) // KEY_BYTES
        first = self._index.match(request.namespace, request.keys).in_memory
        others = self._being_written[request.namespace]
        while first < blocks and _key(request.keys, first) in others:
            first += 1
        slots = self._allocate(request.namespace, blocks - first, now)
        if not slots:
            return Reserved(first, b"", 0)
        writer = next(self._writer_ids)
        self._writers[writer] = Writer(
            request.namespace, request.keys, first, slots, now + _WRITE_S
        )
        others.update(_key(request.keys, first + at) for at in range(len(slots)))
        return Reserved(first, encode_slots(slots), writer)

    def _commit(self, request: Commit, now: float) -> Reply:
        writer = self._end_writer(request.writer)
        if writer is None:
            return Refused("this write took too long and was given up")
        self._insert(writer.namespace, writer.keys, writer.first, writer.slots, now,
                     request.recompute_s)  # fmt: skip
        return Done(len(writer.slots))

    def _abandon(self, request: Abandon, now: float) -> Reply:
        writer = self._end_writer(request.writer)
        if writer is not None:
            self._arena.free(writer.slots)
        return Done()

    def _end_writer(self, id_: int) -> Writer | None:
        writer = self._writers.pop(id_, None)
        if writer is not None:
            self._being_written[writer.namespace].difference_update(
                _key(writer.keys, writer.first + at) for at in range(len(writer.slots))
            )
        return writer

    def _insert(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        slots: Sequence[int],
        now: float,
        recompute_s: float,
    ) -> None:
        unneeded = set(self._index.insert(namespace, keys, first, slots, now, recompute_s))
        for position, slot in enumerate(slots, first):
            if slot not in unneeded:
                self._arena.publish(slot, _header(namespace, keys, position))
        self._arena.free(unneeded)

    def _release(self, request: Release, now: float) -> Reply:
        for lease in request.leases:
            self._arena.free(self._index.release(lease))
        return Done(len(request.leases))

    def _forget_corrupt(self, request: Corrupt, now: float) -> Reply:
        self._corrupt += 1
        if request.namespace not in self._spaces:
            return Done()
        position = len(request.keys) // KEY_BYTES - 1
        freed = self._index.remove(request.namespace, request.keys, position)
        self._arena.free(freed.slots)
        return Done(len(freed.slots))

    # Operators

    def _pin(self, request: Pin, now: float) -> Reply:
        if request.namespace not in self._spaces:
            return Done()
        blocks = self._index.match(request.namespace, request.keys).in_memory
        if blocks and request.pinned:
            self._index.pin(request.namespace, request.keys, blocks)
        elif blocks:
            self._index.unpin(request.namespace, request.keys, blocks)
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
        return Usage(
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

    def _allocate(self, namespace: bytes, blocks: int, now: float) -> list[int]:
        """As many of so many slots as can be had, evicting what is worth least."""
        if blocks <= 0:
            return []
        model, layout = self._spaces[namespace].model, self._spaces[namespace].layout
        quota = self._quotas.get(model)
        if quota is not None:
            own = self._of_model(model)
            blocks = min(blocks, quota // layout.slot_bytes)
            over = self._held(own) + blocks - quota // layout.slot_bytes
            self._evict(over, own, now)
            blocks = min(blocks, quota // layout.slot_bytes - self._held(own))
        slots = self._arena.allocate(layout.slot_bytes, max(0, blocks))
        if len(slots) < blocks:
            same_size = {
                name
                for name, space in self._spaces.items()
                if space.layout.slot_bytes == layout.slot_bytes
            }
            if self._below_its_share(layout.slot_bytes):
                self._take_extents(blocks - len(slots), layout.slot_bytes)
            self._evict(blocks - len(slots), same_size, now)
            slots += self._arena.allocate(layout.slot_bytes, blocks - len(slots))
        return slots

    def _evict(self, blocks: int, within: set[bytes], now: float) -> None:
        if blocks > 0:
            self._arena.free(self._index.evict(blocks, now, within=within).slots)

    def _of_model(self, model: str) -> set[bytes]:
        return {name for name, space in self._spaces.items() if space.model == model}

    def _held(self, namespaces: set[bytes]) -> int:
        """Blocks that namespaces of one size have in memory, and those being written."""
        in_memory = sum(self._index.stats(name).in_memory for name in namespaces)
        writing = (w for w in self._writers.values() if w.namespace in namespaces)
        return in_memory + sum(len(writer.slots) for writer in writing)

    def _below_its_share(self, slot_bytes: int) -> bool:
        """Whether blocks of this size have fewer extents than an equal share of all."""
        usage = self._arena.usage()
        sizes = usage.keys() | {slot_bytes}
        total = sum(of.extents for of in usage.values())
        mine = usage[slot_bytes].extents if slot_bytes in usage else 0
        return mine + 1 <= total // len(sizes)

    def _take_extents(self, blocks: int, slot_bytes: int) -> None:
        """Empty an extent of the size that has most, which costs it the fewest blocks."""
        usage = self._arena.usage()
        usage.pop(slot_bytes, None)
        if not usage:
            return
        donor = max(usage, key=lambda size: usage[size].extents)
        for slots in sorted(self._arena.slots_by_extent(donor), key=len):
            freed = self._index.reclaim(slots)
            if freed is not None:
                self._arena.free(freed.slots)
                return

    # SSD

    def _promote(self, namespace: bytes, keys: bytes, first: int, end: int, now: float) -> float:
        """Begin to read blocks ``[first, end)`` into memory; seconds until they should be there."""
        layout = self._spaces[namespace].layout
        ready_s = (end - first) * layout.slot_bytes / self._ssd_bytes_per_s
        if self._ssd is None or (namespace, _key(keys, first)) in self._promoting:
            return ready_s
        chain = keys[: end * KEY_BYTES]
        locations = self._index.locations(namespace, chain, first)
        slots = self._allocate(namespace, len(locations), now)
        # Making room may have taken what was to be read.
        if not slots or self._index.match(namespace, chain).in_memory != first:
            self._arena.free(slots)
            return 0.0
        self._promoting.add((namespace, _key(keys, first)))
        done = self._readers.submit(
            self._read, namespace, keys, first, locations[: len(slots)], slots
        )
        self._promotions.append(Promotion(namespace, chain, first, slots, done))
        return ready_s

    def _read(
        self, namespace: bytes, keys: bytes, first: int, locations: list[int], slots: list[int]
    ) -> tuple[int, float]:
        """In a thread: how many blocks are whole, up to the first that is not; bytes a second."""
        assert self._ssd is not None
        begin = time.perf_counter()
        good = 0
        slot_bytes = self._spaces[namespace].layout.slot_bytes
        for position, (location, slot) in enumerate(zip(locations, slots, strict=True), first):
            view = self._arena.view(slot, slot_bytes)
            if not self._ssd.read(location, view, namespace, _key(keys, position)):
                break
            good += 1
        return good, good * slot_bytes / max(time.perf_counter() - begin, 1e-6)

    def tick(self, now: float) -> None:
        """Take in what threads finished, end what expired, and write behind."""
        self._arena.free(self._index.expire(now))
        for id_ in [id_ for id_, writer in self._writers.items() if writer.expires_at <= now]:
            self._abandon(Abandon(id_), now)
        for promotion in [job for job in self._promotions if job.done.done()]:
            self._promotions.remove(promotion)
            self._promoted(promotion, now)
        for write in [job for job in self._writes if job.done.done()]:
            self._writes.remove(write)
            self._written(write, now)
        filling = self._used_bytes() > _WRITE_BEHIND_ABOVE * self._arena.capacity_bytes
        if self._ssd is not None and filling and not self._writes:
            self._write_behind(now)

    @property
    def busy(self) -> bool:
        """Whether threads are at work, whose results :meth:`tick` awaits."""
        return bool(self._promotions or self._writes)

    def _promoted(self, job: Promotion, now: float) -> None:
        self._promoting.discard((job.namespace, _key(job.keys, job.first)))
        good, bytes_per_s = job.done.result()
        if good:
            self._ssd_bytes_per_s += _SMOOTHING * (bytes_per_s - self._ssd_bytes_per_s)
            self._insert(
                *(job.namespace, job.keys, job.first, job.slots[:good]), now, _UNKNOWN_RECOMPUTE_S
            )
        self._arena.free(job.slots[good:])
        if good < len(job.slots):
            end = (job.first + good + 1) * KEY_BYTES
            self._forget_corrupt(Corrupt(job.namespace, job.keys[:end]), now)

    def _write_behind(self, now: float) -> None:
        assert self._ssd is not None
        for demotion in self._index.demotion_candidates(_WRITE_BEHIND_BLOCKS, now):
            end = len(demotion.keys) // KEY_BYTES
            lease = self._index.lease(
                demotion.namespace, demotion.keys, end, demotion.first, now, _WRITE_S
            )
            if lease is not None:
                done = self._ssd_writer.submit(self._write, demotion)
                self._writes.append(WriteBehind(demotion, lease.id, done))

    def _write(self, demotion: Demotion) -> list[int]:
        """In a thread: the locations of the blocks, as many as the SSD took."""
        assert self._ssd is not None
        locations: list[int] = []
        slot_bytes = self._spaces[demotion.namespace].layout.slot_bytes
        for position, slot in enumerate(demotion.slots, demotion.first):
            header = _header(demotion.namespace, demotion.keys, position)
            try:
                locations.append(self._ssd.write(header, self._arena.view(slot, slot_bytes)))
            except SsdFullError:
                break
            except OSError as error:
                _logger.warning("cannot keep KV blocks on SSD: %s", error)
                break
        return locations

    def _written(self, job: WriteBehind, now: float) -> None:
        self._arena.free(self._index.release(job.lease))
        demotion, locations = job.demotion, job.done.result()
        if locations:
            self._index.insert_ssd(
                *(demotion.namespace, demotion.keys, demotion.first, locations),
                now,
                _UNKNOWN_RECOMPUTE_S,
            )
        if len(locations) < len(demotion.slots):
            assert self._ssd is not None
            self._index.drop_ssd(self._ssd.drop_oldest_segment())

    # Crashes

    def recover(self, now: float) -> None:
        """Rebuild the index from the arena's headers and the SSD's."""
        for name, (model, layers, layer_bytes) in _read_spaces(self._spaces_file).items():
            self._add_space(bytes.fromhex(name), Space(model, BlockLayout(layers, layer_bytes)))
        in_memory: dict[BlockHeader, int] = {}
        lost: list[int] = []
        for slot, header in list(self._arena.headers()):
            space = self._spaces.get(header.namespace)
            fits = space is not None and space.layout.slot_bytes == self._arena.slot_bytes(slot)
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
        known = [*in_memory, *on_ssd]
        reached: set[int] = set()
        for run in runs(in_memory, in_memory):
            self._arena.free(self._index.insert(*run, now, _UNKNOWN_RECOMPUTE_S))
            reached.update(run.places)
        self._arena.free(set(in_memory.values()) - reached)
        for run in runs(on_ssd, known):
            self._index.insert_ssd(*run, now, _UNKNOWN_RECOMPUTE_S)

    def _keep_spaces(self) -> None:
        text = json.dumps(
            {
                name.hex(): [space.model, space.layout.layers, space.layout.layer_bytes]
                for name, space in self._spaces.items()
            }
        )
        fresh = self._spaces_file.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._spaces_file)

    def close(self) -> None:
        """Finish what threads do; the arena and the SSD stay as they are."""
        self._readers.shutdown()
        self._ssd_writer.shutdown()
        if self._ssd is not None:
            self._ssd.close()
        self._arena.close()


def _read_spaces(file: Path) -> dict[str, tuple[str, int, int]]:
    try:
        found: dict[str, tuple[str, int, int]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Without it, blocks cannot be told apart: they count as never saved.
        return {}
    return found


def _key(keys: bytes, position: int) -> bytes:
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


def _header(namespace: bytes, keys: bytes, position: int) -> BlockHeader:
    parent = _key(keys, position - 1) if position else _NO_PARENT
    return BlockHeader(namespace, _key(keys, position), parent, position)
