"""Ends an answer that stands still: the other side is stopped, or waits for something forever."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader

# Looks within the limit; an answer that stands still ends so much of the limit later at most.
_LOOKS = 8


class StandstillError(Exception):
    """No byte of an answer came for too long."""


class StallWatch:
    """Timer of an answer's body, which fails with :class:`StandstillError` once it stands still.

    Whoever reads the body adds what it has read to ``taken``. That is all that a chunk costs: the
    timer looks at the body a few times within its limit. It does not count the time in which the
    reader is behind.
    """

    def __init__(self, body: StreamReader, limit_s: float) -> None:
        self.taken = 0
        """Bytes that were read of the body."""
        self._body = body
        self._limit_s = limit_s
        self._seen = 0
        self._looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / _LOOKS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        come = self._body.total_bytes
        still = come == self._seen and come == self.taken and not self._body.is_eof()
        self._looks = self._looks + 1 if still else 0
        self._seen = come
        if self._looks == _LOOKS:
            self._body.set_exception(StandstillError())
        else:
            self.start()
