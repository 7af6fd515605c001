"""Opens the store of a node, with all blocks that an earlier store left in memory and on SSD."""

from __future__ import annotations

import time

from loomserve.kvstore.index.eviction import POLICIES
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.ssd import SsdTier
from loomserve.platform.base.errors import StartError

_EXTENTS = 64
_SMALLEST_EXTENT = 2**23
_SSD_SEGMENT_BYTES = 2**28
"""Space on SSD is freed in pieces of this size."""


def open_store(options: StoreOptions) -> BlockStore:
    """Open the store with all blocks that an earlier one left.

    Raises:
        StartError: there is no room, or the folder holds other files.
    """
    extent_bytes = max(_SMALLEST_EXTENT, options.memory // _EXTENTS // 4096 * 4096)
    # A slot that fits an extent must fit a segment.
    segment_bytes = max(_SSD_SEGMENT_BYTES, extent_bytes)
    ssd = SsdTier(options.ssd_folder, options.ssd, segment_bytes) if options.ssd_folder else None
    store = BlockStore(
        _arena(options, extent_bytes),
        Index(POLICIES[options.eviction]),
        ssd,
        options.spaces,
        options.quotas,
    )
    store.recover(time.monotonic())
    return store


def _arena(options: StoreOptions, extent_bytes: int) -> ArenaOwner:
    if options.arena.exists():
        try:
            arena = ArenaOwner.reopen(options.arena)
        except StartError:
            # It is of another version, or truncated: nothing in it can be used.
            return ArenaOwner.create(options.arena, options.memory, extent_bytes)
        if (arena.capacity_bytes, arena.extent_bytes) == (
            options.memory // extent_bytes * extent_bytes,
            extent_bytes,
        ):
            return arena
        arena.close()
    return ArenaOwner.create(options.arena, options.memory, extent_bytes)
