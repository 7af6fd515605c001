"""The KV store's view of KV memory of which a lender holds a shard of each block: whole blocks.

Copies go through the lender's task ring. A forward pass uses that, too, so none is made beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from loomserve.kvstore.engine.transfers.memory import BlockMemory, BlockPieces, Bytes
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.ring.geometry import Geometry

WholeBlocks = Callable[[int, range, torch.Tensor], bool]
"""Copies one layer of whole blocks: :meth:`RemoteShard.read_whole` or its counterpart."""


class LenderGoneError(Exception):
    """The ring has closed, and the lender's shard of the blocks is lost."""


class ShardedMemory(BlockMemory):
    """An engine's KV memory while a shard of it is away; ``whole`` is that without any away."""

    beside_steps = False

    def __init__(self, shard: RemoteShard, whole: BlockMemory, geometry: Geometry) -> None:
        self.layers, self.layer_bytes = whole.layers, whole.layer_bytes
        self.layer_of, self.layers_here = whole.layer_of, shard.layers_here
        self._shard = shard
        self._shape = (geometry.kv_heads, geometry.block_size, 2 * geometry.head_size)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        for first, pieces in runs:
            np.copyto(pieces, self._read(layer, first, len(pieces)))

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        for first, pieces in runs:
            rows = torch.from_numpy(pieces).view(self._dtype).view(len(pieces), *self._shape)
            self._copy(self._shard.write_whole, layer, first, rows)

    def equals_host(self, layer: int, runs: Sequence[BlockPieces]) -> bool:
        return all(
            np.array_equal(pieces, self._read(layer, first, len(pieces))) for first, pieces in runs
        )

    def _read(self, layer: int, first: int, blocks: int) -> Bytes:
        rows = torch.empty((blocks, *self._shape), dtype=self._dtype)
        self._copy(self._shard.read_whole, layer, first, rows)
        found: Bytes = rows.view(blocks, -1).view(torch.uint8).numpy()
        return found

    def _copy(self, copy: WholeBlocks, layer: int, first: int, rows: torch.Tensor) -> None:
        for some in rows.split(self._shard.borrower.ring.most_copied):
            if not copy(layer, range(first, first + len(some)), some):
                raise LenderGoneError
            first += len(some)
