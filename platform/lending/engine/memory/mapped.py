"""KV memory with address space behind each layer's: blocks are added and taken where they are.

Pages of it are taken when they are written first, and may be given back one layer or some blocks
at a time, which no memory of torch's allocator can. So layers that leave cost no copy of those
that stay.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MappedMemory(TorchFunctionMode):  # type: ignore[misc]
    """While active, zeros that torch makes are mapped, which takes no memory; one tensor a time."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: mmap.mmap | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        dtype = kwargs["dtype"]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, args[0] * dtype.itemsize, flags=private)
        return torch.frombuffer(self._memory, dtype=dtype)

    def release(self, rows: torch.Tensor) -> None:
        """Let go of these pages, which are zero from now on.

        Args:
            rows: of what was mapped, each contiguous. Pages that are theirs in part stay.
        """
        if not len(rows):
            return
        assert self._memory is not None
        begin = rows.storage_offset() * rows.itemsize
        size, step = rows[0].nbytes, rows.stride(0) * rows.itemsize
        together = size == step
        for at in range(1 if together else len(rows)):
            first = -(-(begin + at * step) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = begin + at * step + (rows.nbytes if together else size)
            if (pages := end // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
                self._memory.madvise(mmap.MADV_DONTNEED, first, pages)
