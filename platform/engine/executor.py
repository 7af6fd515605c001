"""vLLM's process executor, waiting for its workers without spinning."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def executor_class(config: VllmConfig) -> type[Executor]:
    """The executor that vLLM would take, or its patient kind where devices are cores."""
    chosen: type[Executor] = Executor.get_class(config)
    if chosen is MultiprocExecutor and current_platform.is_cpu():
        return PatientExecutor
    return chosen


_RECHECK_MS = 1


class PatientExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Sleeps until a worker's answer is there, where vLLM polls for it.

    vLLM's EngineCore polls in a loop of ``sched_yield`` while a step runs, which suits a host with
    cores to spare. Where a device is a core, the loop takes a core that another engine or the
    gateway could use. Worse, with one core left for it, the loop takes the interpreter lock back
    before EngineCore's own threads can run: requests then enter one by one, and tokens leave only
    when the engine is idle.
    """

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        for queue in self.response_mqs:
            # Workers of other nodes are waited for through sockets, and have none.
            if queue._spin_condition is not None:
                _sleep_until_notified(queue._spin_condition)


def _sleep_until_notified(condition: SpinCondition) -> None:
    condition.busy_loop_s = 0

    def wait(timeout_ms: int | None = None) -> None:
        # A worker that answers twice within a millisecond, as at the end of every step, may notify
        # only once (its socket holds one message), so the answer itself is looked at again.
        SpinCondition.wait(condition, timeout_ms=_RECHECK_MS)

    condition.wait = wait
