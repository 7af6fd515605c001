"""The host's memory in a GPU's place, for kernels that are interpreted."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch

from loomserve.platform.base.files import replacing


class HostMemory:
    """A :class:`~loomserve.platform.lending.device.memory.SharedMemory` of the host's."""

    def make(self, path: Path, nbytes: int) -> torch.Tensor:
        with replacing(path) as new:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(file, 0, nbytes)
            finally:
                os.close(file)
            return _mapped(new, nbytes)

    def open(self, path: Path, nbytes: int) -> torch.Tensor | None:
        if not path.exists():
            return None
        if (size := path.stat().st_size) != nbytes:
            raise ValueError(f"{path} has {size} bytes, not {nbytes}")
        tensor = _mapped(path, nbytes)
        path.unlink()
        return tensor

    def pin(self, words: torch.Tensor) -> torch.Tensor:
        return words


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


class HostPages:
    """:class:`~loomserve.platform.lending.device.pages.Pages` of the host's; to use one that is not
    mapped ends the process. ``ValueError`` if a page is not a number of the host's pages."""

    def __init__(self, page: int = mmap.PAGESIZE) -> None:
        if page % mmap.PAGESIZE:
            raise ValueError(f"a page of {page} bytes is not a number of {mmap.PAGESIZE}")
        self.page = page
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._address = 0

    def reserve(self, pages: int) -> torch.Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, pages * self.page), dtype=torch.uint8)
        self._address = memory.data_ptr()
        self._allow(range(pages), 0)
        return memory

    def map(self, pages: range) -> None:
        self._allow(pages, mmap.PROT_READ | mmap.PROT_WRITE)

    def unmap(self, pages: range) -> None:
        self._allow(pages, 0)

    def _allow(self, pages: range, access: int) -> None:
        begin = self._address + pages.start * self.page
        if self._protect(begin, len(pages) * self.page, access):
            raise OSError(ctypes.get_errno(), "mprotect")
