"""Opens the store of a node, with all blocks that an earlier store left in memory and on SSD."""

from __future__ import annotations

import time

from loomserve.kvstore.index.eviction import POLICIES
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.peer_source import PeerSource
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.ssd import SsdTier
from loomserve.kvstore.transport.tcp import TcpTransport
from loomserve.platform.base.errors import StartError

_EXTENTS = 64
_SMALLEST_EXTENT = 2**23
_SSD_SEGMENT_BYTES = 2**28
"""Space on SSD is freed in pieces of this size, or an eighth of all."""


def start_server(options: StoreOptions, token: str = "") -> tuple[StoreServer, PeerNetwork | None]:
    """Open the store and serve it to the engines of its node, and to other nodes if it has a host.
    ``token`` is what the stores of the run know, and nobody else. Raises StartError if there is no
    room, the folder holds other files, or the node has no such host."""
    network = None
    if options.host:
        network = PeerNetwork(options.node, TcpTransport(token), options.directory_blocks)
    store = open_store(options, network)
    server = StoreServer(store, options.address)
    server.start()
    if network is not None:
        try:
            network.serve(options.host, lambda: PeerSource(options.address, store))
        except StartError:
            server.stop()
            raise
    return server, network


def open_store(options: StoreOptions, network: PeerNetwork | None = None) -> BlockStore:
    """Open the store with all blocks that an earlier one left. ``network``: other nodes' stores.
    Raises StartError if there is no room, or the folder holds other files."""
    extent_bytes = max(_SMALLEST_EXTENT, options.memory // _EXTENTS // 4096 * 4096)
    # A slot that fits an extent must fit a segment.
    segment_bytes = max(min(_SSD_SEGMENT_BYTES, options.ssd // 8), extent_bytes)
    ssd = SsdTier(options.ssd_folder, options.ssd, segment_bytes) if options.ssd_folder else None
    index = Index(
        POLICIES[options.eviction],
        network.journal if network else None,
        network.refetch_s if network else None,
    )
    arena = _arena(options, extent_bytes)
    store = BlockStore(arena, index, ssd, options.spaces, options.quotas, network)
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
