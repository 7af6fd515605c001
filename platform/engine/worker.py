"""vLLM's CPU worker that waits for work without spinning, and takes seeded requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.engine.adapters.segments import compute_by_segments, refuse_experts
from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning
from loomserve.platform.engine.pipeline_stage import StageModelRunner
from loomserve.platform.engine.process.lone_groups import groups_without_ports
from loomserve.platform.engine.sleeping.memory import give_back_pages
from loomserve.platform.engine.sleeping.weights import SleepingWeights
from loomserve.platform.run.fate import end_with_parent


class NonSpinningWorker(CPUWorker):  # type: ignore[misc]
    """CPU worker that leaves its core to another engine, or the gateway, while it waits."""

    runner_class = StageModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        self.sleeping_weights: SleepingWeights | None = None
        # vLLM makes the queue on which this process waits once the model is loaded.
        sleep_instead_of_spinning()

    def init_device(self) -> None:
        with groups_without_ports(self.vllm_config.parallel_config.world_size_across_dp):
            super().init_device()
        if self.vllm_config.lora_config is not None:
            compute_by_segments()
        self.model_runner: Any
        if type(self.model_runner) is CPUModelRunner:
            # It holds nothing yet.
            self.model_runner = self.runner_class(self.vllm_config, torch.device("cpu"))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.lora_config is not None:
            refuse_experts(self.model_runner.model)
        folder = Path(self.vllm_config.model_config.model)
        self.sleeping_weights = SleepingWeights(self.model_runner.model, folder)
        # Packing has left much of it behind.
        give_back_freed()

    def sleep(self, level: int = 1) -> None:
        """Give back KV memory, and weights that can be made or read again, whatever the level."""
        give_back_pages(self.model_runner.kv_caches)
        if self.sleeping_weights is not None:
            self.sleeping_weights.drop()
        give_back_freed()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Have weights again; KV memory comes back by itself, with the first write to each page."""
        if self.sleeping_weights is not None:
            self.sleeping_weights.restore()
