"""KV memory with spare address space behind each layer's blocks.

A page takes memory from its first write until it is released, and any run of pages can be released:
one layer, or a share of some blocks. torch's allocator can do neither. So when heads or layers
leave for a lender, nothing that stays is copied.
"""

from __future__ import annotations

import mmap

import torch


class MappedMemory:
    """One anonymous mapping of ``nbytes``, of which only written pages take memory."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.int8)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return a view of the mapping with the type, shape, strides and offset of ``like``."""
        whole = self._bytes.view(like.dtype)
        return whole.as_strided(like.shape, like.stride(), like.storage_offset())

    def release(self, rows: torch.Tensor) -> None:
        """Give back the pages of ``rows``, which are zero from now on.

        Args:
            rows: a view of the mapping, each row of which is contiguous. A page that holds anything
                else, too, stays.
        """
        if not len(rows):
            return
        begin = rows.storage_offset() * rows.itemsize
        size, step = rows[0].nbytes, rows.stride(0) * rows.itemsize
        together = size == step
        for at in range(1 if together else len(rows)):
            first = -(-(begin + at * step) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = begin + at * step + (rows.nbytes if together else size)
            if (pages := end // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
                self._memory.madvise(mmap.MADV_DONTNEED, first, pages)
