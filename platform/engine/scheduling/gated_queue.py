"""vLLM's scheduler, and its queue of waiting requests, of which a step may be shown only some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class GatedQueue(FCFSRequestQueue):  # type: ignore[misc]
    """Queue of waiting requests in an order that is set from outside. While it is open :meth:`only`
    to some, it looks as if the others were not there."""

    def __init__(self) -> None:
        super().__init__()
        self._counted: dict[Request, int] = {}
        self._sum = 0
        self._growing: set[Request] = set()
        """Those that were preempted in a step that still gives them tokens."""

    def tokens(self) -> int:
        """Tokens of all requests in the queue, none of which has KV memory yet."""
        self._growing.intersection_update(self._counted)
        for request in self._growing:
            self._count(request, request.num_tokens)
        return self._sum

    def _count(self, request: Request, tokens: int) -> None:
        self._sum += tokens - self._counted.pop(request, 0)
        if tokens:
            self._counted[request] = tokens

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._count(request, request.num_tokens)

    def pop_request(self) -> Request:
        request = super().pop_request()
        self._count(request, 0)
        return request

    def prepend_request(self, request: Request) -> None:
        super().prepend_request(request)
        self._count(request, request.num_tokens)
        if request.num_stale_output_tokens:
            self._growing.add(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        leaving = list(requests)
        super().remove_requests(leaving)
        for request in leaving:
            self._count(request, 0)

    @contextmanager
    def only(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within, show these requests alone, in this order, and any that come meanwhile. Afterwards
        those that are left stand before all others."""
        for request in requests:
            self.remove(request)
        held = list(self)
        self.clear()
        self.extend(requests)
        try:
            yield
        finally:
            self.extend(held)

    def take_first(self, number: int) -> list[Request]:
        return [self.popleft() for _ in range(number)]

    def take_last(self, number: int) -> list[Request]:
        taken = [self.pop() for _ in range(number)]
        taken.reverse()
        return taken

    def put_first(self, requests: Sequence[Request]) -> None:
        self.extendleft(reversed(requests))


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
        ``unblocked`` is vLLM's answer."""
        return unblocked(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return self.may_start(request, super()._handle_blocked_waiting_request)
