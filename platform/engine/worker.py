"""vLLM's CPU worker, waiting for work without spinning, and safe for seeded requests."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning
from loomserve.platform.engine.pipeline_stage import StageModelRunner


class NonSpinningWorker(CPUWorker):  # type: ignore[misc]
    """Its core is another engine's, or the gateway's, while it has nothing to do."""

    runner_class = StageModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its process makes the queue that it waits on later.
        sleep_instead_of_spinning()

    def init_device(self) -> None:
        super().init_device()
        self.model_runner: Any
        if type(self.model_runner) is CPUModelRunner:
            # It holds nothing yet.
            self.model_runner = self.runner_class(self.vllm_config, torch.device("cpu"))
