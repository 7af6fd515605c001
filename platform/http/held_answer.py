"""A stream whose client hears comments until there is an answer, so that no proxy cuts it.

Clients pass over comments of server-sent events. With the first one the answer has begun with
status 200, so a later error is an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import Message, Send

COMMENT = b": waiting\n\n"

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def openai_event(body: bytes, status: int) -> bytes:
    """The event of an error, from the body and the status that it would have had."""
    return b"data: " + body + b"\n\n"


class HeldAnswer:
    """A ``send`` of a stream that may have to wait."""

    def __init__(
        self, send: Send, error_event: Callable[[bytes, int], bytes] = openai_event
    ) -> None:
        self._send = send
        self._error_event = error_event
        self._sending = asyncio.Lock()
        self._began = False
        """Whether comments have been sent."""
        self._answered = False
        self._error = 0
        """Status of an answer that is an error."""

    @asynccontextmanager
    async def comments(self, period_s: float) -> AsyncIterator[None]:
        """Send comments, one a period, until the answer's first message or the end."""
        task = asyncio.create_task(self._comment(period_s))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _comment(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            async with self._sending:
                if self._answered:
                    return
                if not self._began:
                    self._began = True
                    start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                    await self._send(start)
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def send(self, message: Message) -> None:
        """Pass the answer on; its head has gone out already if there were comments."""
        async with self._sending:
            self._answered = True
            if not self._began:
                await self._send(message)
            elif message["type"] == "http.response.start":
                self._error = message["status"] if message["status"] >= 400 else 0
            elif self._error:
                event = self._error_event(message.get("body", b""), self._error)
                await self._send({**message, "body": event})
            else:
                await self._send(message)
