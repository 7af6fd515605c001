"""Ends an answer that stands still: the other side is stopped, or waits for something forever."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from aiohttp import StreamReader

# Looks within the limit; an answer that stands still ends so much of the limit later at most.
_LOOKS = 8


class StandstillError(Exception):
    """No byte of an answer came for too long."""


class StallTimer(ABC):
    """Timer that looks at an answer a few times within its limit, and ends what stands still.

    Looking is all that it does: a chunk costs whoever passes it on an addition to ``taken``.
    """

    def __init__(self, limit_s: float) -> None:
        self.taken = 0
        """How much has been passed on."""
        self._limit_s = limit_s
        self._seen = 0
        self._looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / _LOOKS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    @abstractmethod
    def come(self) -> int:
        """How much has come."""

    @property
    @abstractmethod
    def excused(self) -> bool:
        """Whether that nothing comes is no standstill."""

    @abstractmethod
    def end(self) -> None:
        """End the answer."""

    def _look(self) -> None:
        come = self.come
        still = come == self._seen and not self.excused
        self._looks = self._looks + 1 if still else 0
        self._seen = come
        if self._looks == _LOOKS:
            self.end()
        else:
            self.start()


class StallWatch(StallTimer):
    """Timer of an answer's body, which fails with :class:`StandstillError` once it stands still.

    ``taken`` is in bytes. The time in which the reader is behind does not count.
    """

    def __init__(self, body: StreamReader, limit_s: float) -> None:
        super().__init__(limit_s)
        self._body = body

    @property
    def come(self) -> int:
        return self._body.total_bytes

    @property
    def excused(self) -> bool:
        return self._body.is_eof() or self._body.total_bytes != self.taken

    def end(self) -> None:
        self._body.set_exception(StandstillError())
