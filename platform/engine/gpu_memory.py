"""What an engine's worker takes of its GPU."""

from __future__ import annotations

import torch
from vllm.device_allocator.cumem import CuMemAllocator

from loomserve.platform.devices.memory import GPU_CONTEXT_BYTES


def taken_bytes(device: torch.device) -> int:
    """Memory that this process has of a GPU, whatever other processes have of it.

    It is what torch's allocator keeps, without what vLLM's sleep has given back of that; and a
    constant for CUDA itself, whose share of a GPU with several engines nobody tells: NVML counts by
    processes, which a container does not see.
    """
    kept = int(torch.cuda.memory_reserved(device))
    return kept - _asleep_bytes() + GPU_CONTEXT_BYTES


def _asleep_bytes() -> int:
    # torch counts an allocation of its own whether or not there is memory behind it.
    allocator = CuMemAllocator.instance
    if allocator is None:
        return 0
    return sum(each.handle[1] for each in allocator.pointer_to_data.values() if each.is_asleep)
