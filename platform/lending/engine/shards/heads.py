"""Some KV heads of an engine's attention, with a lender: its worker's part.

The last heads of every layer, with the query heads that attend to them, are kept and computed in a
lender's memory, for all sequences alike; no weight moves. What stays stays where it is: the pages
of the heads that left are given back, and as many more blocks follow of those that stay. So nothing
is copied here, where BanaServe (section 4.3.2) lays all KV out anew. A head's attention needs
nothing of other heads, so outputs are only put side by side.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from loomserve.platform.lending.engine.shards.shard import RemoteShard, room
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry

PAGE_BYTES = mmap.PAGESIZE


def geometry_of_heads(geometry: Geometry, heads: int) -> Geometry:
    """The attention of so many KV heads and of those query heads that attend to them.

    Raises:
        ValueError: it would be none of them, or all.
    """
    if not 0 < heads < geometry.kv_heads:
        raise ValueError(
            f"{heads} of {geometry.kv_heads} KV heads cannot move: at least one must move, and at "
            "least one stay"
        )
    group = geometry.query_heads // geometry.kv_heads
    return replace(geometry, kv_heads=heads, query_heads=heads * group)


def room_without_heads(blocks: int, geometry: Geometry, heads: int) -> int:
    """How many blocks there is room for where so many were, once these heads have left."""
    return room(blocks, *_shares_of(geometry, heads))


def _shares_of(geometry: Geometry, heads: int) -> tuple[int, int, int]:
    """Only whole pages are given back: heads that share one with others leave no room."""
    together = geometry.layer_block_bytes // geometry.kv_heads % PAGE_BYTES
    return (1, 0, 0) if together else (geometry.kv_heads, heads, 0)


class RemoteHeads(RemoteShard):
    """
    Args:
        attention, kv_caches, release, numbers, patience_s: as of any :class:`RemoteShard`.
        geometry: of all heads.
        borrower: of the heads that move.
    """

    def __init__(
        self,
        attention: Sequence[Any],
        kv_caches: list[torch.Tensor],
        release: Callable[[torch.Tensor], None],
        numbers: int,
        geometry: Geometry,
        borrower: Borrower,
        patience_s: float,
    ) -> None:
        super().__init__(attention, kv_caches, release, numbers, borrower, patience_s)
        self.kept = geometry_of_heads(geometry, geometry.kv_heads - borrower.ring.geometry.kv_heads)
        """The attention that stays."""
        self._of_block = _shares_of(geometry, borrower.ring.geometry.kv_heads)
        self._held = list(range(len(kv_caches)))

    @property
    def _shares(self) -> tuple[int, int, int]:
        return self._of_block

    def leave(self) -> None:
        for layer in range(len(self._whole)):
            self._use(layer, self._longer(layer)[:, : self.kept.kv_heads])

    def let_go(self) -> bool:
        if self._held:
            self._release(self._whole[self._held.pop()][:, self.kept.kv_heads :])
        return not self._held

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        self._here(layer)[blocks.start : blocks.stop] = rows[:, :kept]
        return self._write_there(layer, blocks, rows[:, kept:])

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        rows[:, :kept] = self._here(layer)[blocks.start : blocks.stop]
        return self._read_there(layer, blocks, rows[:, kept:])

    def _moved(self, number: int) -> torch.Tensor:
        return self._by_part(self._whole[number])[:, self.kept.kv_heads :]
