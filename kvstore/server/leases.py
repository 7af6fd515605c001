"""Leases that a store gives out, and the slots that come back when they end."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from loomserve.kvstore.index.holds import Lease
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.storage.arena import ArenaOwner

ID_BITS = 63
MOST_LEASES = 2**14
"""Of all engines; each has a few for a request that it starts."""


class _Given(NamedTuple):
    id: int
    """The index's."""
    pid: int
    """Of the process with which it ends; 0: of none that can be seen."""


class Leases:
    """The index's leases under random ids, so that only who was given one can end it.

    Nor can an engine that outlives a store end a lease of the next one. Id 0 is no lease.
    """

    def __init__(self, index: Index, arena: ArenaOwner) -> None:
        self._index = index
        self._arena = arena
        # By the random id.
        self._given: dict[int, _Given] = {}

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
        be seen now ends the lease with itself.
        """
        if len(self._given) >= MOST_LEASES and ttl < math.inf:
            return None
        lease = self._index.lease(namespace, keys, blocks, skip, now, ttl)
        if lease is None:
            return None
        id_ = 1 + secrets.randbits(ID_BITS - 1)
        self._given[id_] = _Given(lease.id, pid if pid and psutil.pid_exists(pid) else 0)
        return lease._replace(id=id_)

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
            if (given := self._given.pop(lease, None)) is not None:
                self._arena.free(self._index.release(given.id))

    def expire(self, now: float) -> None:
        """End the leases whose time or process has ended, as :meth:`release` does."""
        pids = {given.pid for given in self._given.values()} - {0}
        if gone := {pid for pid in pids if not psutil.pid_exists(pid)}:
            self.release([id_ for id_, given in self._given.items() if given.pid in gone])
        self._arena.free(self._index.expire(now))
        there = self._index.leases
        self._given = {id_: given for id_, given in self._given.items() if given.id in there}
