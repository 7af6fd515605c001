"""vLLM's scheduler under names that hold in version 0.29 as in 0.32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from loomserve.platform.engine.scheduling.gated_queue import GatedQueue

_NO_GRAMMAR_YET = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class AnyVersionScheduler(Scheduler):  # type: ignore[misc]
    """Says where requests wait that cannot start yet, and how many may run.

    0.29 moves requests that it skips to a queue of their own. 0.32 does so only with those that
    hold KV blocks; the others stay in ``waiting``, and it notes who they are.
    """

    waiting: GatedQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        newer = hasattr(self, "kv_holding_waiting")
        self.deferred: RequestQueue = self.kv_holding_waiting if newer else self.skipped_waiting
        # 0.32 can hold more requests than may run.
        self._limit = "max_num_active_reqs" if newer else "max_num_running_reqs"

    @property
    def most_running(self) -> int:
        return int(getattr(self, self._limit))

    @most_running.setter
    def most_running(self, number: int) -> None:
        setattr(self, self._limit, number)

    @property
    def blocked(self) -> list[Request]:
        if not getattr(self, "deferred_waiting", ()):
            return []
        return [each for each in self.waiting if each.status is _NO_GRAMMAR_YET]

    def may_start(self, request: Request, unblocked: Callable[[Request], bool]) -> bool:
        """Whether a request that vLLM comes upon waits no longer for its grammar or its KV.

        ``unblocked`` is vLLM's answer. 0.32 asks this of each request, 0.29 of those alone that
        were blocked.
        """
        return unblocked(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:  # 0.32
        return self.may_start(request, super()._handle_blocked_waiting_request)

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:  # 0.29
        return self.may_start(request, super()._try_promote_blocked_waiting_request)
