"""The store of a node: answers what engines and operators ask, one request at a time.

Engines copy blocks in and out of the arena themselves. The store decides which slots they may
write, which blocks they find, what leaves memory, and what goes to SSD and comes back; the copies
to and from SSD run in threads, and :meth:`BlockStore.tick` takes in what they finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, first_keys
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.copies.copy_queue import CopyQueue, Promotions
from loomserve.kvstore.server.copies.fetches import NOTHING_COMES, Fetches
from loomserve.kvstore.server.copies.write_behind import WriteBehind
from loomserve.kvstore.server.grants import Writers
from loomserve.kvstore.server.memory_tier import MemoryTier
from loomserve.kvstore.server.operators import OperatorCalls
from loomserve.kvstore.server.protocol import (
    Abandon,
    Commit,
    Done,
    Flush,
    Found,
    Hottest,
    Inspect,
    Lookup,
    One,
    OneReply,
    Outdated,
    Pin,
    Release,
    Reserve,
    Reserved,
    StoreUsage,
    encode_slots,
)
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockLayout, Space
from loomserve.kvstore.storage.ssd import SsdTier
from loomserve.kvstore.wire import Corrupt, Refused
from loomserve.platform.state.kvstore import KvState

_NOTHING = Found(0, 0, 0, b"", 0.0)


class BlockStore:
    """Index, arena and SSD tier of a node, kept in step for one thread.

    ``now`` is in seconds of a clock that never goes back. ``spaces_file`` keeps what the
    namespaces mean. ``quotas`` bounds the bytes a model may hold in memory. ``network`` are the
    stores of other nodes, which the index's journal is for. ``readers`` and ``ssd_writer`` run the
    copies from and to SSD, the latter one after the other.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        index: Index,
        ssd: SsdTier | None,
        spaces_file: Path,
        quotas: Mapping[str, int],
        network: PeerNetwork | None = None,
        *,
        readers: Executor | None = None,
        ssd_writer: Executor | None = None,
    ) -> None:
        self.memory = MemoryTier(arena, index, spaces_file, quotas)
        self._ssd = ssd
        self._writers = Writers()
        self._promotions: Promotions | None = None
        self._write_behind: WriteBehind | None = None
        self._copies: list[CopyQueue | WriteBehind] = []
        if ssd is not None:
            self._promotions = Promotions(ssd, self.memory, readers)
            self._write_behind = WriteBehind(ssd, self.memory, ssd_writer)
            self._copies += [self._promotions.queue, self._write_behind]
        self._network = network
        self._fetches: Fetches | None = None
        if network is not None:
            self._fetches = Fetches(network, self.memory)
            self._copies.append(self._fetches.queue)
        operators = self._operators = OperatorCalls(self.memory)
        self._answers: dict[type[Any], Callable[[Any, float], OneReply]] = {
            Lookup: self._lookup,
            Reserve: self._reserve,
            Commit: self._commit,
            Outdated: self._outdated,
            Abandon: self._abandon,
            Release: self._release,
            Corrupt: self._corrupt,
            Pin: lambda request, now: operators.pin(request),
            Flush: lambda request, now: operators.flush(request),
            Hottest: lambda request, now: operators.hottest(request),
            Inspect: self._inspect,
        }

    def recover(self, now: float) -> None:
        """Take over what an earlier store left in the arena and on SSD."""
        self.memory.rebuild(self._ssd, now)
        if self._network is not None:
            # A store that follows asks for all contents first.
            self._network.journal.clear()

    def slot_bytes(self, namespace: bytes) -> int | None:
        """Bytes of a namespace's slots, for any thread; None: it is not known."""
        spaces = self.memory.spaces
        return spaces.slot_bytes(namespace) if namespace in spaces else None

    def answer(self, request: One, now: float) -> OneReply:
        if len(getattr(request, "keys", b"")) % KEY_BYTES:
            return Refused(f"keys are {KEY_BYTES} bytes each")
        return self._answers[type(request)](request, now)

    def tick(self, now: float) -> None:
        """Take in what threads finished, end what expired, and write behind."""
        self.memory.leases.expire(now)
        for reservation in self._writers.end_dead():
            self.memory.cancel(reservation)
        for reservation in self._writers.end_expired(now):
            self.memory.cancel(reservation, ended=False)
        for copies in self._copies:
            copies.take_in(now)
        if self._write_behind is not None:
            self._write_behind.begin(now)
        if self._network is not None:
            self._network.tick(now, self.memory.index, self.memory.spaces.items())

    @property
    def busy(self) -> bool:
        """Whether :meth:`tick` awaits what threads are at work on, or has changes to announce."""
        announces = self._network is not None and self._network.busy
        return announces or any(copies.busy for copies in self._copies)

    def close(self) -> None:
        """Wait for the copies under way; the arena and the SSD stay as they are."""
        if self._network is not None:
            self._network.close()
        for copies in self._copies:
            copies.close()
        if self._ssd is not None:
            self._ssd.close()
        self.memory.arena.close()

    def _lookup(self, request: Lookup, now: float) -> OneReply:
        namespace, keys = request.namespace, request.keys
        if not self._knows(namespace, request.block_s):
            return _NOTHING
        index = self.memory.index
        match = index.lookup(namespace, keys, now) if request.use else index.match(namespace, keys)
        in_memory = match.in_memory
        lease = None
        if in_memory > request.skip:
            lease = self.memory.leases.give(
                namespace, keys, in_memory, request.skip, now, request.lease_s, pid=request.pid
            )
            if lease is None:
                # Blocks that nobody keeps there are of no use to the engine.
                return _NOTHING
        ready_s = 0.0
        if request.promote and self._promotions and match.resident > in_memory:
            resident = keys[: match.resident * KEY_BYTES]
            ready_s = self._promotions.begin(namespace, resident, now)
        coming = NOTHING_COMES
        if self._fetches is not None and match.resident == in_memory:
            coming = self._fetches.follow_up(request, in_memory, now)
        return Found(
            in_memory=in_memory,
            resident=match.resident,
            lease=lease.id if lease else 0,
            slots=encode_slots(lease.slots) if lease else b"",
            ready_s=ready_s or coming.ready_s,
            remote=coming.blocks,
        )

    def _knows(self, namespace: bytes, block_s: float) -> bool:
        if self._fetches is not None and block_s:
            return self._fetches.knows(namespace)
        return namespace in self.memory.spaces

    def _reserve(self, request: Reserve, now: float) -> OneReply:
        namespace, keys = request.namespace, request.keys
        space = Space(request.model, BlockLayout(request.layers, request.layer_bytes))
        new = namespace not in self.memory.spaces
        problem = self.memory.spaces.declare(namespace, space)
        if problem is not None:
            return Refused(problem)
        if new and self._network is not None:
            self._network.announcer.note([], {namespace: space})
        in_memory = self.memory.index.match(namespace, keys).in_memory
        first = self._writers.first_unwritten(namespace, keys, in_memory)
        blocks = len(keys) // KEY_BYTES - first
        reservation = self.memory.reserve(namespace, keys, in_memory, first, blocks, now)
        if reservation is None:
            return Reserved(first, b"", 0)
        writer = self._writers.begin(reservation, now, request.pid)
        slots = encode_slots(reservation.slots)
        return Reserved(first, slots, writer, reservation.generation)

    def _commit(self, request: Commit, now: float) -> OneReply:
        reservation = self._writers.end(request.writer)
        if reservation is None:
            return Refused("this write took too long and was given up")
        namespace, keys, blocks = reservation.namespace, reservation.keys, len(reservation.slots)
        if len(request.outdated) == KEY_BYTES:
            # First, for the new blocks continue a run only where nothing follows it.
            self.memory.remove(namespace, first_keys(keys, reservation.first) + request.outdated)
        self.memory.fill(reservation, blocks, now, request.recompute_s)
        # If a block before them was found corrupt meanwhile, the new blocks are gone too.
        there = self.memory.index.match(namespace, keys).in_memory
        if request.keep_s and there:
            self.memory.leases.give(namespace, keys, there, 0, now, request.keep_s)
        return Done(blocks)

    def _abandon(self, request: Abandon, now: float) -> OneReply:
        reservation = self._writers.end(request.writer)
        if reservation is not None:
            self.memory.cancel(reservation)
        return Done()

    def _release(self, request: Release, now: float) -> OneReply:
        self.memory.leases.release(request.leases)
        return Done(len(request.leases))

    def _outdated(self, request: Outdated, now: float) -> OneReply:
        known = request.keys and request.namespace in self.memory.spaces
        return Done(self.memory.remove(request.namespace, request.keys) if known else 0)

    def _corrupt(self, request: Corrupt, now: float) -> OneReply:
        namespace, keys = request.namespace, request.keys
        known = keys and namespace in self.memory.spaces
        return Done(self.memory.remove_corrupt(namespace, keys, now) if known else 0)

    def _inspect(self, request: Inspect, now: float) -> OneReply:
        corrupt_on_ssd = self._promotions.corrupt_blocks if self._promotions else 0
        state = KvState(
            capacity_bytes=self.memory.arena.capacity_bytes,
            used_bytes=self.memory.arena.used_bytes,
            ssd_capacity_bytes=self._ssd.capacity_bytes if self._ssd else 0,
            ssd_used_bytes=self._ssd.used_bytes if self._ssd else 0,
            leases=self._operators.leases(),
            writers=len(self._writers),
            corrupt_blocks=self.memory.corrupt_blocks + corrupt_on_ssd,
            models=self._operators.models(),
            network=self._fetches.usage() if self._fetches else None,
        )
        return StoreUsage(state)
