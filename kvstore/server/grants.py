"""What a store grants for a while: leases of blocks, and slots to those that write blocks.

Ids are random, so that only who was given one can end it, and an engine that outlives a store ends
nothing of the next one.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from loomserve.kvstore.index.holds import Lease
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, key_at
from loomserve.kvstore.server.protocol import WRITE_S
from loomserve.kvstore.storage.arena import ArenaOwner

_ID_BITS = 63
MOST_LEASES = 2**14
"""Of all engines; each has a few for a request that it starts."""


class Leases:
    """The index's leases, under random ids; id 0 is no lease."""

    def __init__(self, index: Index, arena: ArenaOwner) -> None:
        index.leases.ids = iter(_new_id, 0)
        self._index = index
        self._arena = arena
        # The processes with which leases end.
        self._pids: dict[int, int] = {}

    def give(
        self,
        namespace: bytes,
        keys: bytes,
        blocks: int,
        skip: int,
        now: float,
        ttl: float,
        *,
        pid: int = 0,
    ) -> Lease | None:
        """Lease the first ``blocks`` blocks of ``keys``, and return the slots from ``skip`` on.
        None if not all of them are in memory, or if there are too many leases. A process that can
        be seen now ends the lease with itself."""
        if len(self._index.leases) >= MOST_LEASES and ttl < math.inf:
            return None
        lease = self._index.lease(namespace, keys, blocks, skip, now, ttl)
        if lease is not None and pid and psutil.pid_exists(pid):
            self._pids[lease.id] = pid
        return lease

    def hold(self, namespace: bytes, keys: bytes, blocks: int, now: float) -> int:
        """Lease the first ``blocks`` blocks, which are in memory, until :meth:`release`."""
        if not blocks:
            return 0
        lease = self.give(namespace, keys, blocks, blocks - 1, now, math.inf)
        assert lease is not None
        return lease.id

    def release(self, leases: Iterable[int]) -> None:
        """End the leases that have not ended yet, and free what was removed meanwhile."""
        for lease in leases:
            self._pids.pop(lease, None)
            self._arena.free(self._index.leases.release(lease))

    def expire(self, now: float) -> None:
        """End the leases whose time or process has ended, as :meth:`release` does."""
        if gone := {pid for pid in set(self._pids.values()) if not psutil.pid_exists(pid)}:
            self.release([id_ for id_, pid in self._pids.items() if pid in gone])
        self._arena.free(self._index.leases.expire(now))
        self._pids = {id_: pid for id_, pid in self._pids.items() if id_ in self._index.leases}


@dataclass(frozen=True)
class Reservation:
    """Slots for blocks ``[first, first + len(slots))`` of a chain, at least one.

    ``lease`` holds what the chain has in memory before them (0: nothing): were it evicted to make
    this very room, the new blocks would be of no use. They are published with the ``generation``.
    """

    namespace: bytes
    keys: bytes
    first: int
    slots: list[int]
    lease: int
    generation: int = 0

    def block_keys(self) -> list[bytes]:
        return [key_at(self.keys, self.first + at) for at in range(len(self.slots))]


class _Write(NamedTuple):
    reservation: Reservation
    expires_at: float
    pid: int


class Writers:
    """Writes of engines into reserved slots, by random ids."""

    def __init__(self) -> None:
        self._writes: dict[int, _Write] = {}
        self._being_written: dict[bytes, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._writes)

    def begin(self, reservation: Reservation, now: float, pid: int = 0) -> int:
        """Give the reserved slots to a writer, for ``WRITE_S`` seconds; returns its id. A process
        that can be seen now ends the write with itself."""
        writer = _new_id()
        seen = pid if pid and psutil.pid_exists(pid) else 0
        self._writes[writer] = _Write(reservation, now + WRITE_S, seen)
        self._being_written[reservation.namespace].update(reservation.block_keys())
        return writer

    def end(self, writer: int) -> Reservation | None:
        """What the writer had reserved; None if it has ended, or is another store's."""
        write = self._writes.pop(writer, None)
        if write is None:
            return None
        reservation = write.reservation
        self._being_written[reservation.namespace].difference_update(reservation.block_keys())
        return reservation

    def end_dead(self) -> list[Reservation]:
        """End the writes whose processes have ended, and return what they had reserved."""
        pids = {write.pid for write in self._writes.values()} - {0}
        gone = {pid for pid in pids if not psutil.pid_exists(pid)}
        return self._end([id_ for id_, write in self._writes.items() if write.pid in gone])

    def end_expired(self, now: float) -> list[Reservation]:
        """End the writes whose time is up, which may go on; returns what they had reserved."""
        return self._end([id_ for id_, write in self._writes.items() if write.expires_at <= now])

    def _end(self, writers: Iterable[int]) -> list[Reservation]:
        ended = [self.end(id_) for id_ in writers]
        return [reservation for reservation in ended if reservation is not None]

    def first_unwritten(self, namespace: bytes, keys: bytes, first: int) -> int:
        """Position of the first block of ``keys`` from ``first`` on that nobody is writing."""
        others = self._being_written[namespace]
        while first < len(keys) // KEY_BYTES and key_at(keys, first) in others:
            first += 1
        return first


def _new_id() -> int:
    return 1 + secrets.randbits(_ID_BITS - 1)
