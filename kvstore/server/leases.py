"""Leases that a store gives out, and the slots that come back when they end."""

from __future__ import annotations

import math
from collections.abc import Iterable

from loomserve.kvstore.index.holds import Lease
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.storage.arena import ArenaOwner


class Leases:
    """The index's leases under ids that begin at ``epoch``, which differs from store to store.

    So an engine that outlives a store cannot end a lease of the next one. Id 0 is no lease.
    """

    def __init__(self, index: Index, arena: ArenaOwner, epoch: int) -> None:
        self._index = index
        self._arena = arena
        self._epoch = epoch

    def give(
        self, namespace: bytes, keys: bytes, blocks: int, skip: int, now: float, ttl: float
    ) -> Lease | None:
        """Lease the first ``blocks`` blocks of ``keys``, and return the slots from ``skip`` on.

        None if not all of them are in memory.
        """
        lease = self._index.lease(namespace, keys, blocks, skip, now, ttl)
        return None if lease is None else lease._replace(id=self._epoch + lease.id)

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
            self._arena.free(self._index.release(lease - self._epoch))

    def expire(self, now: float) -> None:
        """End the leases whose time has come, as :meth:`release` does."""
        self._arena.free(self._index.expire(now))
