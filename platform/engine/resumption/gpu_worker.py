"""vLLM's GPU worker that takes requests which go on here, and says what it takes of its GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from loomserve.kvstore.engine.connector import own_worker
from loomserve.platform.engine.gpu_memory import taken_bytes
from loomserve.platform.engine.process.lone_groups import groups_without_ports
from loomserve.platform.engine.resumption.model_runner import ResumesRequests


class ResumingGpuModelRunner(ResumesRequests, GPUModelRunner):  # type: ignore[misc]
    """vLLM's first model runner; its second gets a request's tokens so far from the scheduler."""


GREW_MEANWHILE = "Memory usage increased after sleeping."
"""What vLLM says if less of the GPU is free than before, although all of an engine's sleeps."""


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
        """Memory that it has of its GPU; called between two steps."""
        return taken_bytes(self.device)
