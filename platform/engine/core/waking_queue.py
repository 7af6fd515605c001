"""A queue whose reader waits for it and for sockets at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import TypeVar

T = TypeVar("T")


class WakingQueue(Queue[T]):
    """Queue with a file descriptor, ``wakeup``, that can be read from after each ``put``."""

    def __init__(self) -> None:
        super().__init__()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        os.eventfd_write(self.wakeup, 1)

    def take_all(self) -> Iterator[T]:
        """Yield what is in the queue, and what comes meanwhile."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        with suppress(Empty):
            while True:
                yield self.get_nowait()
