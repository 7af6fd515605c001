"""vLLM's queue of waiting requests, of which a step may be shown only some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class GatedQueue(FCFSRequestQueue):  # type: ignore[misc]
    """Queue of waiting requests in an order that is set from outside.

    While it is open :meth:`only` to some, it looks as if the others were not there.
    """

    @contextmanager
    def only(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within, show these requests alone, in this order, and any that come meanwhile.

        Afterwards those that are left stand before all others.
        """
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
