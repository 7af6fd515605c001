"""KV cache of a GPU for copies to and from the store: many blocks in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from loomserve.kvstore.engine.transfers.memory import BlockPieces, KvMemory, LayerPieces

Addresses = NDArray[np.int64]


BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Issues copies between addresses, on the current stream: of sources, targets and sizes in bytes.
Each is int64, ``[copies]``, on the CPU."""


class BatchedMemory(KvMemory):
    """KV cache out of the CPU's reach, copied by addresses. The slots' pieces of a layer do not lie
    together, and torch copies such by way of memory that is not pinned, while the caller waits."""

    # Copies of a layer are issued together: to wait for each would take longer than to copy it.
    # As much memory, twice, is taken on the GPU to compare what was copied.
    copy_bytes = 2**24

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], copy: BatchCopy) -> None:
        super().__init__(kv_caches)
        self._copy = copy

    def beside(self, blocks: int) -> BatchedMemory:
        """Memory for so many more blocks, on the same device; of each all runs lie together."""
        shape = (self.layers, blocks, self.layer_bytes)
        rows = torch.empty(shape, dtype=torch.uint8, device=self.device)
        made = BatchedMemory({str(layer): row for layer, row in enumerate(rows)}, self._copy)
        made._divide(self.runs)
        return made

    def _divide(self, runs: int) -> None:
        """Copy a block's layer, which lies in one run, as so many."""
        self.runs, self.run_bytes = runs, self.layer_bytes // runs
        self._rows = [rows.view(len(rows), runs, self.run_bytes) for rows in self._rows]

    def take(self, other: BatchedMemory, blocks: Sequence[int], first: int) -> None:
        """Copy another memory's ``blocks`` to those from ``first`` on, on the current stream."""
        numbers = torch.tensor(blocks, dtype=torch.int64)
        if self.device.type == "cuda":
            # From other memory than pinned the caller would wait for all that the stream has to do.
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        end = first + len(blocks)
        if self._whole is not None and other._whole is not None:
            mine, theirs = _widest(self._whole, other._whole)
            torch.index_select(theirs, 1, numbers, out=mine[:, first:end])
            return
        for row, source in zip(self._rows, other._rows, strict=True):
            mine, theirs = _widest(row, source)
            torch.index_select(theirs, 0, numbers, out=mine[first:end])

    @cached_property
    def _whole(self) -> torch.Tensor | None:
        """All layers as one tensor, ``[layers, blocks, runs, run_bytes]``, to copy by one call.
        None: they are not equally far apart in one allocation."""
        first, *others = self._rows
        offsets = [each.storage_offset() for each in self._rows]
        step = offsets[1] - offsets[0] if others else 0
        places = {each.untyped_storage().data_ptr() for each in self._rows}
        if step < 0 or len(places) > 1:
            return None
        if offsets != [offsets[0] + layer * step for layer in range(self.layers)]:
            return None
        return first.as_strided((self.layers, *first.shape), (step, *first.stride()))

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        self.layers_to_host([(layer, runs)])

    def layers_to_host(self, layers: Sequence[LayerPieces]) -> None:
        blocks = np.concatenate([self.blocks_at(*each) for each in layers])
        self._issue(blocks, np.concatenate([self.pieces_at(runs) for _, runs in layers]))

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        self._issue(self.pieces_at(runs), self.blocks_at(layer, runs))

    @property
    def rows(self) -> None:
        """The CPU reads none of it."""

    def equals_host(self, layer: int, runs: Sequence[BlockPieces]) -> bool:
        return self.layers_equal_host([(layer, runs)])

    def layers_equal_host(self, layers: Sequence[LayerPieces]) -> bool:
        own = torch.cat(
            [
                self._rows[layer][first : first + len(pieces)]
                for layer, runs in layers
                for first, pieces in runs
            ]
        )
        there = torch.empty_like(own)
        count = len(there) * self.runs
        at = there.data_ptr() + self.run_bytes * np.arange(count, dtype=np.int64)
        self._issue(np.concatenate([self.pieces_at(runs) for _, runs in layers]), at)
        return bool(torch.equal(own, there))

    def blocks_at(self, layer: int, runs: Sequence[BlockPieces]) -> Addresses:
        rows = self._rows[layer]
        numbers = np.concatenate(
            [np.arange(first, first + len(pieces), dtype=np.int64) for first, pieces in runs]
        )
        return self._each_run(numbers * rows.stride(0) + rows.data_ptr(), rows.stride(1))

    def pieces_at(self, runs: Sequence[BlockPieces]) -> Addresses:
        pieces = [
            pieces.ctypes.data + pieces.strides[0] * np.arange(len(pieces), dtype=np.int64)
            for _, pieces in runs
        ]
        return self._each_run(np.concatenate(pieces), self.run_bytes)

    def _each_run(self, first: Addresses, apart: int) -> Addresses:
        """Return the addresses of all runs of each block, from that of its first one."""
        if self.runs == 1:
            return first
        return (first[:, None] + apart * np.arange(self.runs, dtype=np.int64)).reshape(-1)

    def _issue(self, sources: Addresses, targets: Addresses) -> None:
        sizes = np.full(len(sources), self.run_bytes, np.int64)
        self._copy(*(torch.from_numpy(each) for each in (sources, targets, sizes)))


def _widest(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both by numbers of eight bytes where they are aligned: a GPU gathers numbers one by one."""
    places = [
        place
        for each in (one, other)
        for place in (each.storage_offset(), each.shape[-1], *each.stride()[:-1])
    ]
    if any(place % 8 for place in places):
        return one, other
    return one.view(torch.int64), other.view(torch.int64)


def memory_of(kv_caches: Mapping[str, torch.Tensor]) -> KvMemory:
    """An engine's KV cache, on whichever device; ``ValueError`` as of :class:`KvMemory`."""
    if next(iter(kv_caches.values())).device.type == "cpu":
        return KvMemory(kv_caches)
    from vllm._custom_ops import swap_blocks_batch

    return BatchedMemory(kv_caches, swap_blocks_batch)
