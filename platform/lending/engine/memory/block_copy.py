"""Copies KV blocks between the partitions of a borrower: its own memory and its lenders'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.memory.lent import keys_and_values
from loomserve.platform.lending.leaf import BorrowerEnd
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.ring import RingTask

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [blocks, kv_heads, block_size, head_size]."""


class BlockMover:
    """Copies blocks for one worker, layer by layer; it holds views only.

    Args:
        kv_caches: the worker's own, one a layer, [blocks, kv_heads, block_size, 2 * head_size].
        geometry: of its attention.
        partitions: the range of each in the block address space.
        borrowers: by partition, the open rings to lenders.
        patience_s: a lender that takes longer for one layer is given up.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        geometry: Geometry,
        partitions: Partitions,
        borrowers: Mapping[int, BorrowerEnd],
        patience_s: float,
    ) -> None:
        self._own: list[Rows] = [keys_and_values(cache, geometry) for cache in kv_caches]
        self._partitions = partitions
        self._borrowers = borrowers
        self._patience_s = patience_s

    def move(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy each pair's first block onto its second, in all layers.

        Args:
            source: the partition of the first blocks.
            target: the partition of the second ones.
            pairs: block numbers in the whole address space.

        Returns:
            False if a lender's ring has closed, and some blocks are not copied.
        """
        rings = [self._borrowers[each].ring for each in (source, target) if each != OWN]
        most = min(ring.most_copied for ring in rings)
        batches = (pairs[at : at + most] for at in range(0, len(pairs), most))
        return all(self._move_some(source, target, batch) for batch in batches)

    def _move_some(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> bool:
        sources = self._begin(source, [pair[0] for pair in pairs], RingTask.READ)
        targets = self._begin(target, [pair[1] for pair in pairs], RingTask.WRITE)
        for layer in range(len(self._own)):
            rows = self._read(source, sources, layer)
            if rows is None or not self._write(target, targets, layer, rows):
                return False
        return True

    def _begin(self, partition: int, blocks: Sequence[int], task: RingTask) -> list[int]:
        """Return the blocks in the partition's own numbering, once its lender knows them."""
        here = [block - self._partitions.ranges[partition].start for block in blocks]
        if partition != OWN:
            self._borrowers[partition].begin_copy(here, task)
        return here

    def _read(self, partition: int, blocks: list[int], layer: int) -> Rows | None:
        if partition != OWN:
            return self._borrowers[partition].read(layer, self._patience_s)
        key, value = self._own[layer]
        return key[blocks], value[blocks]

    def _write(self, partition: int, blocks: list[int], layer: int, rows: Rows) -> bool:
        if partition != OWN:
            return self._borrowers[partition].write(layer, *rows, self._patience_s)
        for cache, some in zip(self._own[layer], rows, strict=True):
            cache[blocks] = some.to(cache.device)
        return True
