"""Some KV heads of an engine's attention, with a lender: its worker's part.

The last heads of every layer, with the query heads that attend to them, are kept and computed in a
lender's memory, for all sequences alike; no weight moves. What stays is laid out anew in the same
memory, where each block is smaller by the heads that left, so that there are more blocks
(BanaServe, section 4.3.2). A head's attention needs nothing of other heads, so outputs are only
put side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from loomserve.platform.engine.moved_part import MovedPart
from loomserve.platform.lending.borrower import Borrower
from loomserve.platform.lending.geometry import Geometry
from loomserve.platform.lending.ring import Work

_CHUNK_BYTES = 8 << 20
"""Of one layer's KV that are laid out anew at a time, so that the copy between stays in a cache."""


def part_of(geometry: Geometry, heads: int) -> Geometry:
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


class MovedHeads(MovedPart):
    """
    Args:
        attention, kv_caches, patience_s: as of any :class:`MovedPart`.
        geometry: of all heads.
        borrower: of the heads that move.
    """

    def __init__(
        self,
        attention: Sequence[Any],
        kv_caches: list[torch.Tensor],
        geometry: Geometry,
        borrower: Borrower,
        patience_s: float,
    ) -> None:
        super().__init__(attention, kv_caches, borrower, patience_s)
        self.kept = part_of(geometry, geometry.kv_heads - borrower.ring.geometry.kv_heads)
        """The attention that stays."""
        self._whole = list(kv_caches)
        self._heads = geometry.kv_heads
        # What came back, by layer; there while heads come home.
        self._back: list[torch.Tensor] = []

    @property
    def _shares(self) -> tuple[int, int, int]:
        return self._heads, self._heads - self.kept.kv_heads, 0

    def leave(self, blocks: Iterable[int]) -> None:
        """Lay out anew, in place, the heads that stay."""
        kept = self.kept.kv_heads
        size = prod(self._shape(kept))
        for layer, whole in enumerate(self._whole):
            new = whole.view(-1)[: self.blocks * size].view(self.blocks, *self._shape(kept))
            old = whole.view(self._whole_blocks, *self._shape(self._heads))
            # Upwards: a block's new place ends before that of any block behind it begins.
            for chunk in self._chunks(sorted(blocks)):
                new[chunk] = old[chunk, :kept]
            self._use(layer, self._shaped(new))

    def come_home(self, blocks: Iterable[int]) -> None:
        """Lay out all heads as at first."""
        kept = self.kept.kv_heads
        for layer, whole in enumerate(self._whole):
            new = whole.view(self._whole_blocks, *self._shape(self._heads))
            old = self._here(layer)
            # Downwards, for the same reason.
            for chunk in reversed(self._chunks(sorted(blocks))):
                new[chunk, :kept] = old[chunk]
                new[chunk, kept:] = self._back[layer][chunk]
            self._use(layer, self._shaped(whole))
        self._back = []

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        self._here(layer)[blocks.start : blocks.stop] = rows[:, :kept]
        return self._write_there(layer, blocks, rows[:, kept:])

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        kept = self.kept.kv_heads
        rows[:, :kept] = self._here(layer)[blocks.start : blocks.stop]
        return self._read_there(layer, blocks, rows[:, kept:])

    def _here(self, layer: int) -> torch.Tensor:
        return self._kv_caches[layer].view(-1, *self._shape(self.kept.kv_heads))

    def _send(self, blocks: list[int]) -> bool:
        self.borrower.begin_copy(blocks, Work.WRITE)
        for layer, whole in enumerate(self._whole):
            of_all = whole.view(self._whole_blocks, *self._shape(self._heads))
            key, value = of_all[blocks, self.kept.kv_heads :].chunk(2, dim=2)
            if not self.borrower.write(layer, key, value, self._patience_s):
                return False
        return True

    def _fetch(self, blocks: list[int]) -> bool:
        if not self._back:
            shape = (self._whole_blocks, *self._shape(self._heads - self.kept.kv_heads))
            self._back = [torch.empty(shape, dtype=each.dtype) for each in self._whole]
        self.borrower.begin_copy(blocks, Work.READ)
        for layer, back in enumerate(self._back):
            rows = self.borrower.read(layer, self._patience_s)
            if rows is None:
                return False
            back[blocks] = torch.cat(rows, dim=2)
        return True

    def _copy_here(self, sources: list[int], targets: list[int]) -> None:
        for cache in self._kv_caches:
            cache[targets] = cache[sources]

    def _chunks(self, blocks: list[int]) -> list[list[int]]:
        step = max(1, _CHUNK_BYTES // self._whole[0][0].nbytes)
        return [blocks[at : at + step] for at in range(0, len(blocks), step)]

    def _shape(self, heads: int) -> tuple[int, int, int]:
        return heads, 2 * self.kept.block_size, self.kept.head_size

    def _shaped(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.view(len(cache), -1, self.kept.block_size, 2 * self.kept.head_size)
