"""uvicorn's HTTP protocol with the bounds it lacks: slow request heads and numbers of clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loomserve.platform.base.errors import BadRequest, RequestError, RequestTimeout, Unavailable


def bounded_protocol(head_timeout_s: float, max_connections: int) -> type[BoundedProtocol]:
    """A protocol class for ``uvicorn.Config(http=…)`` with these bounds."""
    bounds = {"head_timeout_s": head_timeout_s, "max_connections": max_connections}
    return type("BoundedProtocol", (BoundedProtocol,), bounds)


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client.

    uvicorn makes the instances and knows nothing of bounds, so these are attributes of a subclass
    that :func:`bounded_protocol` makes.
    """

    head_timeout_s: float
    """Seconds from a request's first byte until its line and headers must have come; then the
    connection is closed."""
    max_connections: int
    """A client that connects beyond these is answered 503."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                Unavailable(
                    f"the server already has {self.max_connections} connections; try again shortly",
                    reason="too_many_connections",
                    retry_after_s=1,
                )
            )
        # uvicorn bounds silence only between requests; clients may connect ahead of the first.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_too_late)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_late(self) -> None:
        self._refuse(RequestTimeout(f"no whole request came within {self.head_timeout_s:g} s"))

    def _refuse(self, error: RequestError) -> None:
        """Answer below ASGI, where there is no request yet, and hang up."""
        self._forget_head()
        body = json.dumps(error.body()).encode()
        head = [
            f"HTTP/1.1 {error.status} {error.code}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.headers().items()),
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()
