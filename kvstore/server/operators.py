"""What operators and routers ask of a store: keep a chain, forget blocks, say what there is."""

from __future__ import annotations

from collections import Counter, defaultdict

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.index.selection import hottest_chains
from loomserve.kvstore.server.memory_tier import MemoryTier
from loomserve.kvstore.server.protocol import (
    Done,
    Flush,
    HotChain,
    HotChains,
    Hottest,
    OneReply,
    Pin,
)
from loomserve.kvstore.wire import Refused
from loomserve.platform.state.kvstore import KvModelState

_MOST_PINS = 4096


class OperatorCalls:
    """Pinned chains, and the figures of each model."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._pins: dict[tuple[bytes, bytes], bytes] = {}

    def pin(self, request: Pin) -> OneReply:
        if request.namespace not in self._memory.spaces:
            return Done()
        index = self._memory.index
        chain = (request.namespace, request.keys[-KEY_BYTES:])
        pinned = self._pins.pop(chain, b"")
        # Another chain may have pinned the same blocks.
        if pinned and pinned not in self._pins.values():
            index.unpin(request.namespace, pinned, len(pinned) // KEY_BYTES)
        blocks = index.match(request.namespace, request.keys).in_memory
        if request.pinned and len(self._pins) >= _MOST_PINS:
            return Refused(f"{_MOST_PINS} chains are pinned: unpin some")
        if request.pinned and blocks:
            index.pin(request.namespace, request.keys, blocks)
            self._pins[chain] = request.keys[: blocks * KEY_BYTES]
        return Done(blocks)

    def flush(self, request: Flush) -> OneReply:
        blocks = 0
        for namespace, space in self._memory.spaces.items():
            if request.model in ("", space.model):
                freed = self._memory.index.flush(namespace)
                blocks += len(freed.slots)
                self._memory.arena.free(freed.slots)
        return Done(blocks)

    def hottest(self, request: Hottest) -> OneReply:
        spaces = self._memory.spaces
        return HotChains(
            [
                HotChain(namespace, keys, spaces[namespace].layout.block_bytes)
                for namespace, keys in hottest_chains(
                    self._memory.index.trees(), request.most_bytes
                )
            ]
        )

    def leases(self) -> int:
        index = self._memory.index
        return sum(index.stats(name).leases for name, _ in self._memory.spaces.items())

    def models(self) -> tuple[KvModelState, ...]:
        models: dict[str, Counter[str]] = defaultdict(Counter)
        for namespace, space in self._memory.spaces.items():
            stats = self._memory.index.stats(namespace)
            size = space.layout.block_bytes
            models[space.model].update(
                blocks_in_memory=stats.in_memory,
                blocks_on_ssd=stats.on_ssd,
                bytes_in_memory=stats.in_memory * size,
                bytes_on_ssd=stats.on_ssd * size,
                hit_blocks=stats.hits,
                missed_blocks=stats.misses,
                evicted_blocks=stats.evictions,
            )
        return tuple(KvModelState(model=name, **models[name]) for name in sorted(models))
