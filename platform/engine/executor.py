"""vLLM's process executor that waits for its workers without spinning."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from loomserve.platform.engine import scheduler_calls
from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning
from loomserve.platform.run.fate import end_with_parent


def executor_class(config: VllmConfig) -> type[Executor]:
    """Return vLLM's choice of executor, or the non-spinning one if devices are cores."""
    chosen: type[Executor] = Executor.get_class(config)
    if chosen is MultiprocExecutor and current_platform.is_cpu():
        return NonSpinningExecutor
    return chosen


class NonSpinningExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Multiprocess executor whose EngineCore sleeps while its workers compute.

    Calls that open and end loans concern EngineCore's scheduler too, and vLLM's way to EngineCore
    from outside leads through here.
    """

    def _init_executor(self) -> None:
        end_with_parent()
        sleep_instead_of_spinning()
        super()._init_executor()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        workers = super().collective_rpc
        if isinstance(method, str) and method.startswith(scheduler_calls.PREFIX):
            return [scheduler_calls.answer(self.vllm_config, method, workers, *args, **kwargs)]
        return workers(method, *args, **kwargs)
