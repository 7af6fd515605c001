"""Pages of a device's memory, mapped into addresses that are reserved for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from loomserve.platform.lending.device.memory import cuda_tensor


class Pages(Protocol):
    """Pages of ``page`` bytes, of one device, for one reservation of addresses."""

    page: int

    def reserve(self, pages: int) -> torch.Tensor:
        """Return uint8 ``[pages * page]``, of which nothing may be read or written yet."""

    def map(self, pages: range) -> None:
        """Put memory, of any content, behind these pages, which have none."""

    def unmap(self, pages: range) -> None:
        """Take the memory from behind these pages, and keep it for others."""


class CudaPages:
    """Pages of this process's current GPU, each its own allocation: CUDA unmaps no part of one."""

    def __init__(self) -> None:
        self._driver = driver = importlib.import_module("cuda.bindings.driver")
        self._device = torch.cuda.current_device()
        self._kind = kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self._device
        self._access = access = driver.CUmemAccessDesc()
        access.location = kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page = int(self._call("cuMemGetAllocationGranularity", kind, least))
        self._address = 0
        self._mapped: dict[int, Any] = {}
        self._kept: list[Any] = []

    def reserve(self, pages: int) -> torch.Tensor:
        self._address = int(self._call("cuMemAddressReserve", pages * self.page, 0, 0, 0))
        # Of an address without memory torch does not know the device.
        self.map(range(1))
        memory = cuda_tensor(self._address, pages * self.page, self._free(pages))
        self.unmap(range(1))
        return memory

    def map(self, pages: range) -> None:
        for page in pages:
            handle = (
                self._kept.pop()
                if self._kept
                else self._call("cuMemCreate", self.page, self._kind, 0)
            )
            self._mapped[page] = handle
            self._call("cuMemMap", self._at(page), self.page, 0, handle, 0)
        size = len(pages) * self.page
        self._call("cuMemSetAccess", self._at(pages.start), size, [self._access], 1)

    def unmap(self, pages: Iterable[int]) -> None:
        # CUDA itself does not wait for kernels that use them.
        torch.cuda.synchronize(self._device)
        for page in pages:
            self._call("cuMemUnmap", self._at(page), self.page)
            self._kept.append(self._mapped.pop(page))

    def _free(self, pages: int) -> Callable[[int], None]:
        """Return what gives all back; it is called with the address, at the memory's end."""

        def free(address: int) -> None:
            self.unmap(list(self._mapped))
            while self._kept:
                self._call("cuMemRelease", self._kept.pop())
            self._call("cuMemAddressFree", address, pages * self.page)

        return free

    def _at(self, page: int) -> int:
        return self._address + page * self.page

    def _call(self, name: str, *given: Any) -> Any:
        """Call the driver; ``MemoryError`` if the GPU has no more memory, else ``RuntimeError``."""
        error, *values = getattr(self._driver, name)(*given)
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(
                f"the GPU has no page of {self.page} bytes left: lower kv_cache_memory"
            )
        if int(error):
            raise RuntimeError(f"CUDA: {name}: {error}")
        return values[0] if values else None
