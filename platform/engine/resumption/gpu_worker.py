"""vLLM's GPU worker that takes requests which go on here, and says what it takes of its GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from loomserve.kvstore.engine.connector import own_worker
from loomserve.platform.devices.memory import GPU_CONTEXT_BYTES
from loomserve.platform.engine.process.lone_groups import groups_without_ports
from loomserve.platform.engine.resumption.model_runner import ResumesRequests

GREW_MEANWHILE = "Memory usage increased after sleeping."
"""What vLLM says if less of the GPU is free than before, although all of an engine's sleeps."""


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


class ResumingGpuModelRunner(ResumesRequests, GPUModelRunner):  # type: ignore[misc]
    """vLLM's first model runner; its second gets a request's tokens so far from the scheduler."""


class ResumingGpuWorker(Worker):  # type: ignore[misc]
    """Makes our model runner where vLLM would make its own."""

    runner_class = ResumingGpuModelRunner

    def init_device(self) -> None:
        with groups_without_ports(self.vllm_config.parallel_config.world_size_across_dp):
            super().init_device()
        self.model_runner: Any
        if type(self.model_runner) is GPUModelRunner:
            # It holds nothing yet.
            self.model_runner = self.runner_class(self.vllm_config, self.device)

    def sleep(self, level: int = 1) -> None:
        """Give memory back, whatever other engines take of the GPU meanwhile."""
        if (store := own_worker()) is not None:
            store.give_back()
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != GREW_MEANWHILE:
                raise

    def taken_bytes(self) -> int:
        return taken_bytes(self.device)
