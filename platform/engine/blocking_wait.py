"""Waits of vLLM's processes for each other's messages, without spinning.

vLLM's EngineCore and its workers pass messages through shared memory and, for a second after each,
poll for the next in a loop of ``sched_yield``. That suits a host with cores to spare. Where a
device is a core, the loop takes a core that another engine, the gateway or EngineCore's own threads
could use: an idle model's worker slows the busy one's front end for a second after each request.

vLLM makes these queues by names of its modules (``MultiprocExecutor._init_executor``,
``WorkerProc._init_message_queues``), which leads to ``shm_broadcast.SpinCondition`` with a fixed
second. No option, subclass or argument reaches them, and a worker never sees the queue on which its
process waits. So the class is replaced in its module.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_VLLM_SPINS_S = 1.0
_RECHECK_MS = 1


class SleepingCondition(SpinCondition):  # type: ignore[misc]
    """Condition that sleeps on vLLM's notification where vLLM spins, and looks every millisecond.

    The second look is there because a socket that holds one notification may swallow another, as
    when a worker answers twice at the end of a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.busy_loop_s = 0.0

    def wait(self, timeout_ms: int | None = None) -> None:
        recently = time.monotonic() <= self.last_read + _VLLM_SPINS_S
        super().wait(_RECHECK_MS if recently else timeout_ms)


def sleep_instead_of_spinning() -> None:
    """Make every queue that this process makes from now on wait asleep."""
    shm_broadcast.SpinCondition = SleepingCondition
