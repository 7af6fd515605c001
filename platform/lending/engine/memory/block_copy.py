"""Copies KV blocks from one side of a borrower's memory to another: its own, or a lender's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loomserve.platform.lending.engine.block_partitions import OWN, Sides
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.ring import RingTask

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [blocks, kv_heads, block_size, head_size]."""


class BlockMover:
    """Of one worker; where it copies nothing, it costs nothing.

    Args:
        kv_caches: its own, a layer each, [blocks, kv_heads, block_size, 2 * head_size].
        geometry: of its attention.
        sides: whose blocks are which.
        borrowers: the ring of each side that is open.
        patience_s: after which a lender is given up.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        geometry: Geometry,
        sides: Sides,
        borrowers: Mapping[int, Borrower],
        patience_s: float,
    ) -> None:
        of = (geometry.kv_heads, 2 * geometry.block_size, geometry.head_size)
        self._own: list[Rows] = [cache.view(-1, *of).chunk(2, dim=2) for cache in kv_caches]
        self._sides = sides
        self._borrowers = borrowers
        self._patience_s = patience_s

    def move(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy each pair's first block onto its second, in all layers.

        Args:
            source: the side of the first blocks.
            target: the side of the second ones.
            pairs: of blocks in the numbering of all sides together.

        Returns:
            False if a lender's ring has closed, and some blocks are not copied.
        """
        rings = [self._borrowers[side].ring for side in (source, target) if side != OWN]
        most = min(ring.most_copied for ring in rings)
        parts = (pairs[at : at + most] for at in range(0, len(pairs), most))
        return all(self._move_some(source, target, part) for part in parts)

    def _move_some(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> bool:
        taken = self._begin(source, [pair[0] for pair in pairs], RingTask.READ)
        given = self._begin(target, [pair[1] for pair in pairs], RingTask.WRITE)
        for layer in range(len(self._own)):
            rows = self._read(source, taken, layer)
            if rows is None or not self._write(target, given, layer, rows):
                return False
        return True

    def _begin(self, side: int, blocks: Sequence[int], work: RingTask) -> list[int]:
        here = [block - self._sides.ranges[side].start for block in blocks]
        if side != OWN:
            self._borrowers[side].begin_copy(here, work)
        return here

    def _read(self, side: int, blocks: list[int], layer: int) -> Rows | None:
        if side != OWN:
            return self._borrowers[side].read(layer, self._patience_s)
        key, value = self._own[layer]
        return key[blocks], value[blocks]

    def _write(self, side: int, blocks: list[int], layer: int, rows: Rows) -> bool:
        if side != OWN:
            return self._borrowers[side].write(layer, *rows, self._patience_s)
        for cache, of_it in zip(self._own[layer], rows, strict=True):
            cache[blocks] = of_it
        return True
