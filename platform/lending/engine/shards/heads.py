"""KV heads of an engine that a lender keeps and computes.

A shard is the last KV heads of every layer, with the query heads that attend to them, for all
sequences alike; no weight leaves the engine. The heads that stay do so where they are: pages of
those that left become more blocks behind. BanaServe (section 4.3.2) lays all KV
out anew instead; here nothing is copied. A head's attention needs nothing of other heads, so
outputs are only put side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loomserve.platform.lending.engine.memory.lent import heads_lie_apart
from loomserve.platform.lending.engine.shards.shard import LocalKv, RemoteShard, room
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry


def geometry_of_heads(geometry: Geometry, heads: int) -> Geometry:
    """Return the geometry of ``heads`` KV heads and the query heads that attend to them;
    ``ValueError`` if these are no heads, or all."""
    if not 0 < heads < geometry.kv_heads:
        raise ValueError(
            f"{heads} of {geometry.kv_heads} KV heads cannot move: at least one must move, and at "
            "least one stay"
        )
    group = geometry.query_heads // geometry.kv_heads
    return replace(geometry, kv_heads=heads, query_heads=heads * group)


def room_without_heads(kv: LocalKv, heads: int) -> int:
    """Return how many blocks fit into the memory of the engine's own once these heads have left it.
    Only whole pages are given back. Where a block's heads lie together, a head's share of a block
    must consist of such; where each head's blocks do, those of all own blocks."""
    blocks, every, page = len(kv.caches[0]), kv.geometry.kv_heads, kv.memory.page
    head_bytes = kv.geometry.layer_block_bytes // every
    if heads_lie_apart(kv.caches[0]):
        freed, taken = blocks * head_bytes // page, -(-blocks * head_bytes // page)
        return (taken + heads * freed // (every - heads)) * page // head_bytes
    return blocks if head_bytes % page else room(blocks, every, heads)


class RemoteHeads(RemoteShard):
    """The last KV heads of every layer, as many as the borrower's ring has."""

    def __init__(self, kv: LocalKv, borrower: Borrower, patience_s: float) -> None:
        every, heads = kv.geometry, borrower.ring.geometry.kv_heads
        super().__init__(kv, borrower, patience_s, room_without_heads(kv, heads))
        self.kept = geometry_of_heads(every, every.kv_heads - heads)
        """The attention that stays."""
        frees = self.blocks > self._whole_blocks
        self._held = list(range(len(kv.caches))) if frees else []
        self._freed: list[int] = []

    def hand_over(self) -> None:
        for layer in range(len(self._whole)):
            self._use(layer, self._longer(layer)[:, : self.kept.kv_heads])

    def free_memory(self) -> bool:
        """Have the memory of one layer's heads for more blocks of the others."""
        if self._held:
            layer = self._held.pop()
            self._memory.release(self._remote(layer))
            self._memory.back(self._more(layer))
            self._freed.append(layer)
        return not self._held

    def prepare_return(self) -> bool:
        """Give one layer's heads the memory of the blocks that must be left by now."""
        if self._freed:
            layer = self._freed.pop()
            self._memory.release(self._more(layer))
            self._memory.back(self._remote(layer))
        return not self._freed

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        self._kv_caches[layer][blocks.start : blocks.stop] = rows[:, :kept]
        return self._write_there(layer, blocks, rows[:, kept:])

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        rows[:, :kept] = self._kv_caches[layer][blocks.start : blocks.stop]
        return self._read_there(layer, blocks, rows[:, kept:])

    def _more(self, layer: int) -> torch.Tensor:
        return super()._more(layer)[:, : self.kept.kv_heads]

    def _remote(self, number: int) -> torch.Tensor:
        return self._whole[number][:, self.kept.kv_heads :]
