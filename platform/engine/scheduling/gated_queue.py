"""vLLM's queue of waiting requests, of which a step may be shown only some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class GatedQueue(RequestQueue):  # type: ignore[misc]
    """Queue of waiting requests in an order that is set from outside.

    While it is open :meth:`only` to some, it looks as if the others were not there.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    @contextmanager
    def only(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within, show these requests alone, in this order, and whoever comes meanwhile.

        Afterwards those that are left stand before all others.
        """
        for request in requests:
            self._requests.remove(request)
        held, self._requests = self._requests, deque(requests)
        try:
            yield
        finally:
            held.extendleft(reversed(self._requests))
            self._requests = held

    def take_first(self, number: int) -> list[Request]:
        return [self._requests.popleft() for _ in range(number)]

    def take_last(self, number: int) -> list[Request]:
        """The last so many, in their order."""
        taken = [self._requests.pop() for _ in range(number)]
        taken.reverse()
        return taken

    def put_first(self, requests: Sequence[Request]) -> None:
        """Put these requests before all others, in this order."""
        self._requests.extendleft(reversed(requests))

    # As vLLM's own queue of the policy "first come, first served".

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def pop_request(self) -> Request:
        return self._requests.popleft()

    def peek_request(self) -> Request:
        return self._requests[0]

    def prepend_request(self, request: Request) -> None:
        self._requests.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._requests.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        self._requests = deque(each for each in self._requests if each not in gone)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
