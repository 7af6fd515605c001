"""KV cache of a GPU for copies to and from the store: many blocks in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loomserve.kvstore.engine.transfers.memory import BlockPieces, KvMemory

Addresses = NDArray[np.int64]


class BatchCopy(Protocol):
    """Issues copies of bytes between addresses, on the current stream."""

    def __call__(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, /
    ) -> None:
        """Each argument is int64, ``[copies]``, on the CPU; sizes are bytes."""


class BatchedMemory(KvMemory):
    """KV cache out of the CPU's reach, copied by addresses.

    The slots' pieces of a layer do not lie together, and torch copies such by way of memory that
    is not pinned, while the caller waits.
    """

    # Copies of a layer are issued together: to wait for each would take longer than to copy it.
    # As much memory, twice, is taken on the GPU to compare what was copied.
    copy_bytes = 2**24

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], copy: BatchCopy) -> None:
        super().__init__(kv_caches)
        self._copy = copy

    def beside(self, blocks: int) -> BatchedMemory:
        """Memory for so many more blocks, on the same device."""
        shape = (self.layers, blocks, self.layer_bytes)
        rows = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return BatchedMemory({str(layer): row for layer, row in enumerate(rows)}, self._copy)

    def take(self, other: BatchedMemory, blocks: Sequence[int], first: int) -> None:
        """Copy another memory's ``blocks`` to those from ``first`` on, on the current stream."""
        numbers = torch.tensor(blocks, dtype=torch.int64)
        if self.device.type == "cuda":
            # From other memory than pinned the caller would wait for all that the stream has to do.
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        for mine, theirs in zip(*self._alike(other), strict=True):
            torch.index_select(theirs, 0, numbers, out=mine[first : first + len(blocks)])

    def _alike(self, other: BatchedMemory) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All layers of both by the widest numbers that both allow."""
        if self._words is None or other._words is None:
            return self._rows, other._rows
        return self._words, other._words

    @cached_property
    def _words(self) -> list[torch.Tensor] | None:
        """All layers by numbers of eight bytes, as a GPU gathers single ones one by one.

        None: they are not aligned.
        """
        sizes = [(each.shape[1], each.stride(0), each.storage_offset()) for each in self._rows]
        if any(size % 8 for each in sizes for size in each):
            return None
        return [each.view(torch.int64) for each in self._rows]

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        self._issue(self.blocks_at(layer, runs), pieces_at(runs))

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        self._issue(pieces_at(runs), self.blocks_at(layer, runs))

    def on_host(self, layer: int, first: int, blocks: int) -> None:
        """The CPU reads none of it."""

    def equals_host(self, layer: int, runs: Sequence[BlockPieces]) -> bool:
        rows = self._rows[layer]
        own = torch.cat([rows[first : first + len(pieces)] for first, pieces in runs])
        there = torch.empty_like(own)
        at = there.data_ptr() + self.layer_bytes * np.arange(len(there), dtype=np.int64)
        self._issue(pieces_at(runs), at)
        return bool(torch.equal(own, there))

    def blocks_at(self, layer: int, runs: Sequence[BlockPieces]) -> Addresses:
        """Addresses of the layer of these blocks, ``[blocks]``."""
        rows = self._rows[layer]
        numbers = np.concatenate(
            [np.arange(first, first + len(pieces), dtype=np.int64) for first, pieces in runs]
        )
        numbers *= rows.stride(0)
        numbers += rows.data_ptr()
        return numbers

    def _issue(self, sources: Addresses, targets: Addresses) -> None:
        sizes = np.full(len(sources), self.layer_bytes, np.int64)
        self._copy(*(torch.from_numpy(each) for each in (sources, targets, sizes)))


def pieces_at(runs: Sequence[BlockPieces]) -> Addresses:
    """Addresses of these blocks' pieces, ``[blocks]``."""
    return np.concatenate(
        [
            pieces.ctypes.data + pieces.strides[0] * np.arange(len(pieces), dtype=np.int64)
            for _, pieces in runs
        ]
    )


def memory_of(kv_caches: Mapping[str, torch.Tensor]) -> KvMemory:
    """An engine's KV cache, on whichever device it is.

    Raises:
        ValueError: as of :class:`KvMemory`.
    """
    if next(iter(kv_caches.values())).device.type == "cpu":
        return KvMemory(kv_caches)
    from vllm._custom_ops import swap_blocks_batch

    return BatchedMemory(kv_caches, swap_blocks_batch)
