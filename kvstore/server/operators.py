"""What operators and routers ask of a store: keep a chain, forget blocks, say what there is."""

from __future__ import annotations

from loomserve.kvstore.index.hottest import hottest_chains
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.protocol import (
    Done,
    Flush,
    HotChain,
    HotChains,
    Hottest,
    ModelUsage,
    Pin,
    Refused,
    Reply,
)
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner

_MOST_PINS = 4096


class OperatorCalls:
    """Pinned chains, and the figures of each model."""

    def __init__(self, index: Index, spaces: Spaces, arena: ArenaOwner) -> None:
        self._index = index
        self._spaces = spaces
        self._arena = arena
        self._pins: dict[tuple[bytes, bytes], bytes] = {}

    def pin(self, request: Pin) -> Reply:
        """Pin a chain, or let it go."""
        if request.namespace not in self._spaces:
            return Done()
        chain = (request.namespace, request.keys[-KEY_BYTES:])
        pinned = self._pins.pop(chain, b"")
        # Another chain may have pinned the same blocks.
        if pinned and pinned not in self._pins.values():
            self._index.unpin(request.namespace, pinned, len(pinned) // KEY_BYTES)
        blocks = self._index.match(request.namespace, request.keys).in_memory
        if request.pinned and len(self._pins) >= _MOST_PINS:
            return Refused(f"{_MOST_PINS} chains are pinned: unpin some")
        if request.pinned and blocks:
            self._index.pin(request.namespace, request.keys, blocks)
            self._pins[chain] = request.keys[: blocks * KEY_BYTES]
        return Done(blocks)

    def flush(self, request: Flush) -> Reply:
        """Forget blocks of a model, or of all."""
        blocks = 0
        for namespace, space in self._spaces.items():
            if request.model in ("", space.model):
                freed = self._index.flush(namespace)
                blocks += len(freed.slots)
                self._arena.free(freed.slots)
        return Done(blocks)

    def hottest(self, request: Hottest) -> Reply:
        """Say which chains were used last."""
        return HotChains(
            [
                HotChain(namespace, keys, self._spaces[namespace].layout.block_bytes)
                for namespace, keys in hottest_chains(self._index.trees(), request.most_bytes)
            ]
        )

    def leases(self) -> int:
        """Leases that have not ended."""
        return sum(self._index.stats(namespace).leases for namespace, _ in self._spaces.items())

    def models(self) -> list[ModelUsage]:
        """Contents and use of the store by model."""
        models: dict[str, ModelUsage] = {}
        for namespace, space in self._spaces.items():
            stats = self._index.stats(namespace)
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
        return [models[name] for name in sorted(models)]
