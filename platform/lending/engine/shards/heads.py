"""KV heads of an engine that a lender keeps and computes.

A shard is the last KV heads of every layer, with the query heads that attend to them, for all
sequences alike; no weight leaves the engine. The heads that stay do so where they are: the pages of
those that left are given back, and more blocks follow behind. BanaServe (section 4.3.2) lays all KV
out anew instead; here nothing is copied. A head's attention needs nothing of other heads, so
outputs are only put side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loomserve.platform.lending.engine.memory.mapped import page_bytes
from loomserve.platform.lending.engine.shards.shard import LocalKv, RemoteShard, room
from loomserve.platform.lending.leaf import BorrowerEnd
from loomserve.platform.lending.ring.geometry import Geometry


def geometry_of_heads(geometry: Geometry, heads: int) -> Geometry:
    """Return the geometry of ``heads`` KV heads and the query heads that attend to them.

    Raises:
        ValueError: these are no heads, or all.
    """
    if not 0 < heads < geometry.kv_heads:
        raise ValueError(
            f"{heads} of {geometry.kv_heads} KV heads cannot move: at least one must move, and at "
            "least one stay"
        )
    group = geometry.query_heads // geometry.kv_heads
    return replace(geometry, kv_heads=heads, query_heads=heads * group)


def room_without_heads(blocks: int, geometry: Geometry, heads: int, device: torch.device) -> int:
    """Return how many blocks fit into the memory of ``blocks`` once these heads have left it."""
    return room(blocks, *_shares_of(geometry, heads, device))


def _shares_of(geometry: Geometry, heads: int, device: torch.device) -> tuple[int, int, int]:
    """Only whole pages are given back: heads that share one with others leave no room."""
    together = geometry.layer_block_bytes // geometry.kv_heads % page_bytes(device)
    return (1, 0, 0) if together else (geometry.kv_heads, heads, 0)


class RemoteHeads(RemoteShard):
    """The last KV heads of every layer, as many as the borrower's ring has."""

    def __init__(self, kv: LocalKv, borrower: BorrowerEnd, patience_s: float) -> None:
        super().__init__(kv, borrower, patience_s)
        every, remote = kv.geometry, borrower.ring.geometry
        self.kept = geometry_of_heads(every, every.kv_heads - remote.kv_heads)
        """The attention that stays."""
        self._of_block = _shares_of(every, remote.kv_heads, kv.device)
        self._held = list(range(len(kv.caches)))

    @property
    def _shares(self) -> tuple[int, int, int]:
        return self._of_block

    def hand_over(self) -> None:
        for layer in range(len(self._whole)):
            self._use(layer, self._longer(layer)[:, : self.kept.kv_heads])

    def free_memory(self) -> bool:
        if self._held:
            self._release(self._whole[self._held.pop()][:, self.kept.kv_heads :])
        return not self._held

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        self._kv_caches[layer][blocks.start : blocks.stop] = rows[:, :kept]
        return self._write_there(layer, blocks, rows[:, kept:])

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        rows[:, :kept] = self._kv_caches[layer][blocks.start : blocks.stop]
        return self._read_there(layer, blocks, rows[:, kept:])

    def _remote(self, number: int) -> torch.Tensor:
        return self._whole[number][:, self.kept.kv_heads :]
