"""Removal of blocks that must not be read: damaged ones, and tails that another block replaces."""

from __future__ import annotations

import math

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.leases import Leases
from loomserve.kvstore.server.protocol import Corrupt, Done, Outdated, Reply
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import seed


class BlockRemoval:
    """Removes the last block of a chain, with what follows it, from index and arena."""

    def __init__(self, index: Index, arena: ArenaOwner, spaces: Spaces, leases: Leases) -> None:
        self.corrupt_blocks = 0
        """Blocks in memory that were found damaged."""
        self._index = index
        self._arena = arena
        self._spaces = spaces
        self._leases = leases

    def outdated(self, request: Outdated) -> Reply:
        if not request.keys or request.namespace not in self._spaces:
            return Done()
        return Done(self.last(request.namespace, request.keys))

    def last(self, namespace: bytes, keys: bytes) -> int:
        freed = self._index.remove(namespace, keys, len(keys) // KEY_BYTES - 1)
        self._arena.free(freed.slots)
        return len(freed.slots)

    def corrupt(self, request: Corrupt, now: float) -> Reply:
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
        self.corrupt_blocks += 1
        return Done(self.last(namespace, keys))

    def _slot_of(self, namespace: bytes, keys: bytes, now: float) -> int | None:
        """Slot of the last block of ``keys``; None if it is not in memory."""
        blocks = len(keys) // KEY_BYTES
        lease = self._leases.give(namespace, keys, blocks, blocks - 1, now, math.inf)
        if lease is None:
            return None
        self._leases.release([lease.id])
        return lease.slots[0]
