"""vLLM's process executor that waits for its workers without spinning."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from loomserve.platform.engine import scheduler_calls
from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning
from loomserve.platform.run.fate import end_with_parent


def executor_class(config: VllmConfig) -> type[Executor]:
    chosen: type[Executor] = Executor.get_class(config)
    if chosen is MultiprocExecutor and current_platform.is_cpu():
        return NonSpinningExecutor
    return chosen


def one_process_executor(config: VllmConfig) -> type[Executor]:
    """Return an executor whose only worker shares EngineCore's process, where there is only one. A
    worker beside EngineCore's process computes while the next step is scheduled, and takes a core
    to wait for it: where few requests run, two processes may be faster, else one."""
    chosen = executor_class(config)
    of_vllm = (NonSpinningExecutor, MultiprocExecutor, UniProcExecutor)
    if config.parallel_config.world_size == 1 and chosen in of_vllm:
        return OneProcessExecutor
    return chosen


class _AnswersSchedulerCalls:
    """Part of an executor: calls that open and end loans concern EngineCore's scheduler too, and
    vLLM's way to EngineCore from outside leads through an executor."""

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        workers = super().collective_rpc  # type: ignore[misc]
        if isinstance(method, str) and method.startswith(scheduler_calls.PREFIX):
            return [scheduler_calls.answer(self.vllm_config, method, workers, *args, **kwargs)]
        return workers(method, *args, **kwargs)


class NonSpinningExecutor(_AnswersSchedulerCalls, MultiprocExecutor):  # type: ignore[misc]
    """Multiprocess executor whose EngineCore sleeps while its workers compute."""

    def _init_executor(self) -> None:
        end_with_parent()
        sleep_instead_of_spinning()
        # vLLM has workers of a CPU spawned, so that OpenMP reads in each on which cores its threads
        # are. Ours bind themselves, and need not import all for 20 s.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()


class OneProcessExecutor(_AnswersSchedulerCalls, UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor of one worker in EngineCore's own process."""
