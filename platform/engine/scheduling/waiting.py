"""vLLM's scheduler, and which requests wait in it that cannot start yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from loomserve.platform.engine.scheduling.gated_queue import GatedQueue

_NO_GRAMMAR_YET = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class WaitingScheduler(Scheduler):  # type: ignore[misc]
    """Says where requests wait that cannot start yet, and how many may run.

    Those that hold KV blocks are in a queue of their own; the others stay in ``waiting``, and vLLM
    notes who they are.
    """

    waiting: GatedQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deferred: RequestQueue = self.kv_holding_waiting

    @property
    def most_running(self) -> int:
        return int(self.max_num_active_reqs)

    @most_running.setter
    def most_running(self, number: int) -> None:
        self.max_num_active_reqs = number

    @property
    def blocked(self) -> list[Request]:
        if not self.deferred_waiting:
            return []
        return [each for each in self.waiting if each.status is _NO_GRAMMAR_YET]

    def may_start(self, request: Request, unblocked: Callable[[Request], bool]) -> bool:
        """Whether a request that vLLM comes upon waits no longer for its grammar or its KV.

        ``unblocked`` is vLLM's answer.
        """
        return unblocked(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return self.may_start(request, super()._handle_blocked_waiting_request)
