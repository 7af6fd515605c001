"""The store of a node: answers what engines and operators ask, one request at a time.

Engines copy blocks in and out of the arena themselves. The store decides which slots they may
write, which blocks they find, what leaves memory, and what goes to SSD and comes back; the copies
to and from SSD run in threads, and :meth:`BlockStore.tick` takes in what they finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, first_keys
from loomserve.kvstore.peers.messages import AnnouncedSpace
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.allocator import Allocator
from loomserve.kvstore.server.copies.fetches import NOTHING_COMES, Fetches
from loomserve.kvstore.server.copies.promotions import Promotions
from loomserve.kvstore.server.copies.write_behind import WriteBehind
from loomserve.kvstore.server.leases import Leases
from loomserve.kvstore.server.operators import OperatorCalls
from loomserve.kvstore.server.protocol import (
    Abandon,
    Commit,
    Corrupt,
    Done,
    Flush,
    Found,
    Hottest,
    Inspect,
    Lookup,
    Outdated,
    Pin,
    Refused,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    StoreUsage,
    encode_slots,
)
from loomserve.kvstore.server.rebuild import rebuild
from loomserve.kvstore.server.removal import BlockRemoval
from loomserve.kvstore.server.spaces import Space, Spaces
from loomserve.kvstore.server.writers import Writers
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockLayout
from loomserve.kvstore.storage.ssd import SsdTier


class BlockStore:
    """Index, arena and SSD tier of a node, kept in step for one thread.

    ``now`` is in seconds of a clock that never goes back. ``spaces_file`` keeps what the
    namespaces mean. ``quotas`` bounds the bytes a model may hold in memory. ``network`` are the
    stores of other nodes, of which the index's journal is; None: there is no other. ``readers`` and
    ``ssd_writer`` run the copies from and to SSD, the latter one after the other, and ``fetchers``
    those from other nodes.
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
        fetchers: Executor | None = None,
    ) -> None:
        self.arena = arena
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
        self._network = network
        self._fetches: Fetches | None = None
        if network is not None:
            self._fetches = Fetches(network, arena, self._spaces, self._allocator, fetchers)
        self._operators = OperatorCalls(index, self._spaces, arena)
        self._removal = BlockRemoval(index, arena, self._spaces, self._leases)
        self._answers: dict[type[Any], Callable[[Any, float], Reply]] = {
            Lookup: self._lookup,
            Reserve: self._reserve,
            Commit: self._commit,
            Outdated: lambda request, now: self._removal.outdated(request),
            Abandon: self._abandon,
            Release: self._release,
            Corrupt: self._removal.corrupt,
            Pin: lambda request, now: self._operators.pin(request),
            Flush: lambda request, now: self._operators.flush(request),
            Hottest: lambda request, now: self._operators.hottest(request),
            Inspect: self._inspect,
        }

    def recover(self, now: float) -> None:
        """Take over what an earlier store left in the arena and on SSD."""
        self._spaces.load()
        rebuild(self._index, self.arena, self._ssd, self._spaces, now)
        if self._network is not None:
            # Whoever follows asks for all contents first.
            self._network.journal.take()

    def slot_bytes(self, namespace: bytes) -> int | None:
        """Bytes of a namespace's slots, for any thread; None: it is not known."""
        return self._spaces.slot_bytes(namespace) if namespace in self._spaces else None

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
        if self._network is not None and self._fetches is not None:
            self._fetches.take_in(now)
            self._network.tick(now, self._index, _announced(self._spaces.items()))

    @property
    def busy(self) -> bool:
        """Whether :meth:`tick` awaits what threads are at work on, or has changes to announce."""
        announces = self._network is not None and self._network.busy
        return announces or any(copies.busy for copies in self._copies())

    def close(self) -> None:
        """Wait for the copies under way; the arena and the SSD stay as they are."""
        if self._network is not None:
            self._network.close()
        for copies in self._copies():
            copies.close()
        if self._ssd is not None:
            self._ssd.close()
        self.arena.close()

    def _copies(self) -> list[Promotions | WriteBehind | Fetches]:
        """What runs in threads: nothing without SSD and other nodes."""
        all_ = (self._promotions, self._write_behind, self._fetches)
        return [copies for copies in all_ if copies is not None]

    # Engines

    def _lookup(self, request: Lookup, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        if not self._knows(namespace, request.block_s):
            return Found(0, 0, 0, b"", 0.0)
        if request.use:
            match = self._index.lookup(namespace, keys, now)
        else:
            match = self._index.match(namespace, keys)
        lease = None
        if match.in_memory > request.skip:
            lease = self._leases.give(
                *(namespace, keys, match.in_memory, request.skip, now, request.lease_s),
                pid=request.pid,
            )
            if lease is None:
                # Blocks that nobody keeps there are of no use to the engine.
                return Found(0, 0, 0, b"", 0.0)
        ready_s = 0.0
        if request.promote and self._promotions and match.resident > match.in_memory:
            resident = keys[: match.resident * KEY_BYTES]
            ready_s = self._promotions.begin(namespace, resident, now)
        coming = NOTHING_COMES
        if self._fetches is not None and match.resident == match.in_memory:
            coming = self._fetches.follow_up(request, match.in_memory, now)
        return Found(
            in_memory=match.in_memory,
            resident=match.resident,
            lease=lease.id if lease else 0,
            slots=encode_slots(lease.slots) if lease else b"",
            ready_s=ready_s or coming.ready_s,
            remote=coming.blocks,
        )

    def _knows(self, namespace: bytes, block_s: float) -> bool:
        """Whether blocks of a namespace are here, or can be fetched."""
        if self._fetches is not None and block_s:
            return self._fetches.knows(namespace)
        return namespace in self._spaces

    def _reserve(self, request: Reserve, now: float) -> Reply:
        namespace, keys = request.namespace, request.keys
        layout = BlockLayout(request.layers, request.layer_bytes)
        new = namespace not in self._spaces
        problem = self._spaces.declare(namespace, Space(request.model, layout))
        if problem is not None:
            return Refused(problem)
        if new and self._network is not None:
            self._network.announcer.note([], _announced([(namespace, self._spaces[namespace])]))
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
            self._removal.last(namespace, first_keys(keys, reservation.first) + request.outdated)
        self._allocator.fill(reservation, blocks, now, request.recompute_s)
        # If a block before them was found corrupt meanwhile, the new blocks are gone too.
        there = self._index.match(namespace, keys).in_memory
        if request.keep_s and there:
            self._leases.give(namespace, keys, there, 0, now, request.keep_s)
        return Done(blocks)

    def _abandon(self, request: Abandon, now: float) -> Reply:
        reservation = self._writers.end(request.writer)
        if reservation is not None:
            self._allocator.cancel(reservation)
        return Done()

    def _release(self, request: Release, now: float) -> Reply:
        self._leases.release(request.leases)
        return Done(len(request.leases))

    # Operators

    def _inspect(self, request: Inspect, now: float) -> Reply:
        corrupt_on_ssd = self._promotions.corrupt_blocks if self._promotions else 0
        return StoreUsage(
            capacity_bytes=self.arena.capacity_bytes,
            used_bytes=self.arena.used_bytes,
            ssd_capacity_bytes=self._ssd.capacity_bytes if self._ssd else 0,
            ssd_used_bytes=self._ssd.used_bytes if self._ssd else 0,
            leases=self._operators.leases(),
            writers=len(self._writers),
            corrupt_blocks=self._removal.corrupt_blocks + corrupt_on_ssd,
            models=self._operators.models(),
            network=self._fetches.usage() if self._fetches else None,
        )


def _announced(spaces: Iterable[tuple[bytes, Space]]) -> Iterator[AnnouncedSpace]:
    for namespace, space in spaces:
        yield AnnouncedSpace(namespace, space.model, space.layout.layers, space.layout.layer_bytes)
