"""What a GPU's worker says that it takes: of torch's allocator, but for what sleeps."""

from __future__ import annotations

import pytest
import torch

# With vLLM's CUDA wheel it needs a driver.
pytest.importorskip("vllm.device_allocator.cumem", exc_type=ImportError)

# isort: split
from vllm.device_allocator import AllocationData
from vllm.device_allocator.cumem import CuMemAllocator

from loomserve.platform.devices.memory import GPU_CONTEXT_BYTES, GPU_ENGINE_BYTES
from loomserve.platform.engine.resumption.gpu_worker import taken_bytes

GPU = torch.device("cuda", 1)
WEIGHTS, KV, OTHER = 16 * 2**30, 8 * 2**30, 2**28


@pytest.fixture(autouse=True)
def reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    by_device = {GPU: WEIGHTS + KV + OTHER}
    monkeypatch.setattr(torch.cuda, "memory_reserved", by_device.__getitem__)


def test_of_an_engine_that_cannot_sleep_it_is_what_torch_keeps() -> None:
    assert CuMemAllocator.instance is None
    assert taken_bytes(GPU) == WEIGHTS + KV + OTHER + GPU_CONTEXT_BYTES


@pytest.mark.parametrize("asleep", [(), (WEIGHTS,), (WEIGHTS, KV)])
def test_what_sleeps_is_not_taken(asleep: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = CuMemAllocator.__new__(CuMemAllocator)
    allocator.pointer_to_data = {
        address: AllocationData((0, size, address, 0), tag, is_asleep=size in asleep)
        for address, (tag, size) in enumerate((("weights", WEIGHTS), ("kv_cache", KV)))
    }
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    assert taken_bytes(GPU) == WEIGHTS + KV + OTHER - sum(asleep) + GPU_CONTEXT_BYTES


def test_what_is_planned_for_an_engine_has_the_context_in_it() -> None:
    assert GPU_CONTEXT_BYTES < GPU_ENGINE_BYTES
