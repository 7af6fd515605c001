"""KV memory with spare address space behind each layer's blocks.

A page takes memory from its first write until it is released, and any run of pages can be released:
one layer, or a share of some blocks. torch's allocator can do neither. So when heads or layers
leave for a lender, nothing that stays is copied.
"""

from __future__ import annotations

import mmap

import torch

# What CUDA's driver maps at once, of GPUs with their own memory.
_CUDA_PAGE = 2 * 2**20


def page_bytes(device: torch.device) -> int:
    """The least memory of a device that can be given back by itself."""
    return mmap.PAGESIZE if device.type == "cpu" else _CUDA_PAGE


class MappedMemory:
    """One anonymous mapping of ``nbytes`` of the host, of which only written pages take memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """
        Args:
            nbytes: address space.
            device: on which the engine computes.

        Raises:
            ValueError: it does not compute on the host's memory.
        """
        if device.type != "cpu":
            raise ValueError(f"KV memory that is lent is of the host, and this engine on {device}")
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
