"""KV memory of which a lender has a part of each block, as the KV store sees it: whole blocks.

What is copied goes through the lender's task ring, which a forward pass uses too; so nothing is
copied beside one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from loomserve.kvstore.engine.memory import BlockMemory, Bytes
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.ring.geometry import Geometry

WholeBlocks = Callable[[int, range, torch.Tensor], bool]
"""A way of the part's to copy one layer of whole blocks."""


class LenderGoneError(Exception):
    """The ring has closed, and what the lender had of the blocks is lost."""


class ShardedMemory(BlockMemory):
    """
    Args:
        part: that is away.
        whole: the engine's memory without that.
        geometry: of the engine's attention.
    """

    beside_steps = False

    def __init__(self, part: RemoteShard, whole: BlockMemory, geometry: Geometry) -> None:
        self.layers, self.layer_bytes = whole.layers, whole.layer_bytes
        self.layer_of, self.layers_here = whole.layer_of, part.layers_here
        self._part = part
        self._shape = (geometry.kv_heads, 2 * geometry.block_size, geometry.head_size)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)

    def to_host(self, layer: int, first: int, pieces: Bytes) -> None:
        np.copyto(pieces, self._read(layer, first, len(pieces)))

    def from_host(self, layer: int, first: int, pieces: Bytes) -> None:
        rows = torch.from_numpy(pieces).view(self._dtype).view(len(pieces), *self._shape)
        self._copy(self._part.write_whole, layer, first, rows)

    def on_host(self, layer: int, first: int, blocks: int) -> None:
        """Some of the bytes are in the lender's process."""

    def equals_host(self, layer: int, first: int, pieces: Bytes) -> bool:
        return bool(np.array_equal(pieces, self._read(layer, first, len(pieces))))

    def _read(self, layer: int, first: int, blocks: int) -> Bytes:
        rows = torch.empty((blocks, *self._shape), dtype=self._dtype)
        self._copy(self._part.read_whole, layer, first, rows)
        found: Bytes = rows.view(blocks, -1).view(torch.uint8).numpy()
        return found

    def _copy(self, copy: WholeBlocks, layer: int, first: int, rows: torch.Tensor) -> None:
        """As many at a time as fit through the ring."""
        for some in rows.split(self._part.borrower.ring.most_copied):
            if not copy(layer, range(first, first + len(some)), some):
                raise LenderGoneError
            first += len(some)
