"""uvicorn's HTTP protocol with the bounds it lacks, and without what it takes too readily."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loomserve.platform.base.errors import (
    BadRequest,
    HeadTooLarge,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from loomserve.platform.http.address_limit import AddressLimit

LOOKS = 8
"""How often a connection is looked at within its ``send_timeout_s``."""
# After its last answer a connection takes, and drops, what its client still sends. If it were
# closed at once, the kernel would reset it, and the client might never read the answer.
_LINGER_S = 2.0
_VERSIONS = frozenset({"1.0", "1.1"})


@dataclass(frozen=True)
class Bounds:
    """What one client may take of a server."""

    head_timeout_s: float
    """Seconds from a request's first byte until its line and headers must have come."""
    max_connections: int | None = None
    """A client that connects beyond these is answered 503; None: there is room for all."""
    by_address: AddressLimit | None = None
    """The same for one client's connections."""
    send_timeout_s: float | None = None
    """A client that takes nothing of an answer for so long is cut off; None: it never is."""
    max_head: int = 64 * 2**10
    """Bytes of a request's line and headers, and of all between two pieces of a body."""
    max_fields: int = 100
    """Headers of a request, and trailers."""


INTERNAL = Bounds(head_timeout_s=30.0, max_head=128 * 2**10)
"""Bounds for the platform's own processes as clients. They pass on what clients ask for, whose head
may be as large as a gateway takes it, and their own headers."""


def bounded_protocol(bounds: Bounds) -> type[BoundedProtocol]:
    """A protocol class for ``uvicorn.Config(http=…)`` with these bounds."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": bounds})


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client.

    uvicorn makes the instances and knows nothing of bounds, so they are an attribute of a subclass
    that :func:`bounded_protocol` makes.
    """

    bounds: Bounds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        # Bytes that may still come before a head must be whole, or more of a body be there.
        self._room = self.bounds.max_head
        self._in_head = True
        self._fields = 0
        self._problem: RequestError | None = None
        # What comes is dropped.
        self._deaf = False
        # The connection ends with the answer under way.
        self._is_last = False
        self._served: RequestResponseCycle | None = None
        self._unsent = 0
        self._still = 0

    # The connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.bounds.by_address and self.client:
            self.bounds.by_address.enter(self.client[0])
        problem = self._one_too_many()
        if problem is not None:
            self._deaf = True
            self._write(problem)
            self.transport.close()
            return
        # uvicorn bounds silence only between requests; clients may connect ahead of the first.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.bounds.by_address and self.client:
            self.bounds.by_address.leave(self.client[0])
        self._forget_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # uvicorn tells the request that came last, which may wait behind this one.
        _disconnect(self._served)

    def _one_too_many(self) -> Unavailable | None:
        most, by_address = self.bounds.max_connections, self.bounds.by_address
        elsewhere = by_address.elsewhere if by_address is not None else 0
        if most is not None and len(self.connections) + elsewhere > most:
            return _too_many(f"the server already has {most} connections")
        # A listener for TLS has looked before it shook hands.
        if by_address is None or self.client is None or self.scheme == "https":
            return None
        if by_address.open(self.client[0]) > by_address.most:
            return _too_many(f"your address already has {by_address.most} connections")
        return None

    def look(self) -> None:
        """Cut off a client that takes nothing; called ``LOOKS`` times in ``send_timeout_s``."""
        unsent = self.transport.get_write_buffer_size()
        # Then nothing is added to what is unsent, and it stays the same only if nothing is taken.
        waits = self._is_idle or self.flow.write_paused or self.transport.is_closing()
        self._still = self._still + 1 if waits and unsent and unsent == self._unsent else 0
        self._unsent = unsent
        if self._still >= LOOKS:
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # What comes

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.bounds.head_timeout_s, self._head_too_late)
        if len(data) < self._room:
            self._room -= len(data)
            super().data_received(data)
        else:
            self._feed_pieces(memoryview(data))

    def _feed_pieces(self, data: memoryview) -> None:
        # The parser joins the pieces of a value anew each time one comes, so it must not get them.
        while data and not self._deaf:
            piece, data = data[: self._room], data[self._room :]
            self._room -= len(piece)
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
            if self._room <= 0 and not self._deaf:
                self._refuse(
                    HeadTooLarge(
                        f"The request's line and headers have more than {self.bounds.max_head} "
                        "bytes. Send less."
                    )
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._fields = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > self.bounds.max_fields:
            self._give_up(
                HeadTooLarge(f"The request has more than {self.bounds.max_fields} headers.")
            )
        # A trailer is no header: it comes when the headers have been acted upon.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._forget_head()
        self._in_head = False
        self._room = self.bounds.max_head
        self._check_head()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            # It is answered by HTTP/1.1, but the client may go on in another protocol.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._room = self.bounds.max_head
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._room = self.bounds.max_head
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        self._deaf = True

    def _check_head(self) -> None:
        """Refuse what the parser lets pass and RFC 9112 does not."""
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            self._give_up(BadRequest(f"This server speaks HTTP/1.1, not {version}."))
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and (version, value.lower()) != ("1.1", b"chunked"):
                self._give_up(BadRequest("The only Transfer-Encoding is chunked, of HTTP/1.1."))
        if hosts > 1 or (not hosts and version == "1.1"):
            self._give_up(BadRequest("A request has one Host header."))

    def _give_up(self, problem: RequestError) -> None:
        """Stop the parser, which has the problem answered by :meth:`send_400_response`."""
        self._problem = problem
        raise ValueError(problem.message)

    # What is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, self._closing_early(cycle, app))

    def _closing_early(self, cycle: RequestResponseCycle, app: Any) -> Any:
        """The application, whose answers end the connection if there is more of the body."""

        async def start(message: Message) -> None:
            cycle.keep_alive = False
            await cycle.send(message)  # type: ignore[arg-type]
            # Else uvicorn would close the connection at once.
            cycle.keep_alive = self._is_last = True

        def send(message: Message) -> Coroutine[Any, Any, None]:
            if cycle.more_body and message["type"] == "http.response.start":
                return start(message)
            return cycle.send(message)  # type: ignore[arg-type]

        def run(scope: Scope, receive: Receive, _: Send) -> Any:
            return app(scope, receive, send)

        return run

    def on_response_complete(self) -> None:
        if self._is_last:
            self._linger()
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem or BadRequest(msg))

    def _head_too_late(self) -> None:
        self._refuse(
            RequestTimeout(f"no whole request came within {self.bounds.head_timeout_s:g} s")
        )

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: RequestError) -> None:
        """Answer below ASGI, where there is no whole request, and hang up."""
        self._forget_head()
        self._deaf = True
        cycle = self.cycle
        if self._is_idle:
            self._write(error)
            self._linger()
        elif not cycle.more_body:
            # It follows a request whose answer is under way, and is dropped after that.
            cycle.keep_alive = False
        elif self.pipeline or cycle.response_started:
            self.transport.close()
        else:
            _disconnect(cycle)
            self._write(error)
            self._linger()

    def _write(self, error: RequestError) -> None:
        body = json.dumps(error.body()).encode()
        head = [
            f"HTTP/1.1 {error.status} {error.code}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(
                f"{name}: {value}"
                for name, value in error.headers().items()
                if name != "Connection"
            ),
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    def _linger(self) -> None:
        """End the connection after what has been written, in peace."""
        self._deaf = True
        self._unset_keepalive_if_required()
        if not self.transport.can_write_eof():
            # TLS waits for the client's farewell by itself.
            self.transport.close()
            return
        self.flow.resume_reading()
        self.transport.write_eof()
        self.timeout_keep_alive_task = self.loop.call_later(
            _LINGER_S, self.timeout_keep_alive_handler
        )


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _too_many(what: str) -> Unavailable:
    return Unavailable(f"{what}; try again shortly", reason="too_many_connections", retry_after_s=1)
