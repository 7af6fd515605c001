"""KV memory with spare address space behind each layer's blocks.

Any run of pages can be given back by itself: one layer, or a share of some blocks. torch's
allocator cannot do that. So when heads or layers leave for a lender, nothing that stays is copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import product
from typing import Protocol

import torch


class AddressSpace(Protocol):
    """Memory of which only some pages are there; no less than ``page`` bytes can be given back."""

    page: int

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return a view with the type, shape, strides and offset of ``like``."""

    def back(self, rows: torch.Tensor) -> None:
        """Have memory for all of ``rows``, a view of it, that has none."""

    def release(self, rows: torch.Tensor) -> None:
        """Give back the memory of ``rows``, a view of it; what they hold is lost. A page that holds
        anything else, too, stays."""


class MappedMemory:
    """One anonymous mapping of ``nbytes`` of the host, of which only written pages take memory."""

    page = mmap.PAGESIZE

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """``ValueError`` if the engine does not compute on the host's memory."""
        if device.type != "cpu":
            raise ValueError(f"KV memory that is lent is of the host, and this engine on {device}")
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.int8)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        return view_as(self._bytes, like)

    def back(self, rows: torch.Tensor) -> None:
        """A page takes memory from its first write on."""

    def release(self, rows: torch.Tensor) -> None:
        for begin, end in runs(rows):
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            if (pages := end // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
                self._memory.madvise(mmap.MADV_DONTNEED, first, pages)


def view_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return whole.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def runs(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first byte, from the storage's begin, and the end of each run that lies together.
    Elements of ``rows`` do not overlap; its dimensions may be in any order."""
    together, apart = 1, []
    for step, size in sorted(zip(rows.stride(), rows.shape, strict=True)):
        if step == together or size == 1:
            together *= size
        else:
            apart.append([at * step for at in range(size)])
    if not rows.numel():
        return
    for offsets in product(*reversed(apart)):
        begin = (rows.storage_offset() + sum(offsets)) * rows.itemsize
        yield begin, begin + together * rows.itemsize
