"""Uses pages of CUDA's by way of the package that reaches the driver, in whose place one of the
host's memory stands; a process of its own, told where that is by ``LD_LIBRARY_PATH``."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loomserve.platform.lending.device import pages as pages_module
from loomserve.platform.lending.device.pages import CudaPages
from loomserve.platform.lending.engine.memory.paged import PagedMemory

PAGE = 2 * 2**20


def host_tensor(address: int, nbytes: int, free: Callable[[int], Any]) -> torch.Tensor:
    """In place of a GPU's tensor."""
    held = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(held, free, address)
    return torch.frombuffer(held, dtype=torch.uint8)


def main() -> None:
    synchronized: list[int] = []
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = synchronized.append  # type: ignore[assignment]
    pages_module.cuda_tensor = host_tensor
    driver = ctypes.CDLL("libcuda.so.1")

    made = CudaPages()
    assert made.page == PAGE
    memory = PagedMemory(11 * PAGE - 5, made)
    whole = memory.tensor(torch.empty(11 * PAGE - 5, dtype=torch.int8, device="meta"))
    synchronized.clear()
    memory.back(whole[: 3 * PAGE])
    memory.back(whole[PAGE : 5 * PAGE + 1])
    assert driver.pages_that_exist() == 6
    whole[: 6 * PAGE] = 7
    assert not synchronized

    # Kernels that use it have ended before; the page is kept for the next place.
    memory.release(whole[PAGE - 1 : 3 * PAGE])
    assert synchronized == [0]
    assert driver.pages_that_exist() == 6
    memory.back(whole[8 * PAGE : 10 * PAGE])
    assert driver.pages_that_exist() == 6
    assert (whole[8 * PAGE : 10 * PAGE] == 7).all()
    assert (whole[:PAGE] == 7).all()
    whole[8 * PAGE : 10 * PAGE] = 1
    assert (whole[3 * PAGE : 6 * PAGE] == 7).all()

    with pytest.raises(MemoryError, match="lower kv_cache_memory"):
        memory.back(whole)
    del whole, memory, made
    gc.collect()
    assert driver.pages_that_exist() == 0
    print("all is well")


if __name__ == "__main__":
    main()
