"""uvicorn's HTTP protocol with the bounds it lacks, and without what it takes too readily."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loomserve.platform.access.shared_counts import Counts
from loomserve.platform.base.errors import (
    BadRequest,
    HeadTooLarge,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from loomserve.platform.base.loopback import is_loopback

CHECKS = 8
"""How often a connection is looked at within its ``send_timeout_s``."""
# After its last answer a connection takes, and drops, what its client still sends. If it were
# closed at once, the kernel would reset it, and the client might never read the answer.
_LINGER_S = 2.0
_VERSIONS = frozenset({"1.0", "1.1"})
ONCE = frozenset({
    *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect"),
    *(b"host", b"origin", b"transfer-encoding", b"x-api-key", b"x-slo-ms"),
})  # fmt: skip
"""Headers that a check goes by. Of two, a proxy may have looked at the one and this server at the
other, so there is one at most."""
_PORTS = {b"http": b":80", b"https": b":443"}
_IPV6_NETWORK = 64


@dataclass(frozen=True)
class Bounds:
    """What one client may take of a server."""

    head_timeout_s: float
    """Seconds from a request's first byte until its line and headers must have come."""
    max_connections: int | None = None
    """A client that connects beyond these is answered 503, if no connection gives way; None: there
    is room for as many as there are file descriptors."""
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


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, bounds: Bounds, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.bounds = bounds
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
        self.served: RequestResponseCycle | None = None
        """The request that came last; None: there was none."""
        self._unsent = 0
        self._still = 0
        self.idle_since = self.loop.time()
        """Since when it has no request, if it has none."""
        self.refusal: Unavailable | None = None
        """Why the connection is not served; None: it is."""
        self.ended: Callable[[BoundedProtocol], None] | None = None
        """Called at the connection's end."""

    # The connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.refusal is not None:
            self._deaf = True
            self._write(self.refusal)
            self.transport.close()
            return
        # uvicorn bounds silence only between requests; clients may connect ahead of the first.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is not None:
            self.ended(self)
        self._forget_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # uvicorn notifies the request that came last, which may wait behind this one.
        _disconnect(self.served)

    def give_way(self) -> None:
        """Close the connection, which has no request under way."""
        if self._head_timer is not None:
            self._forget_head()
            self._write(too_many("others came while your request was not whole"))
        self._deaf = True
        self.transport.close()

    def look(self) -> None:
        """Cut off a client that takes nothing; called ``CHECKS`` times in ``send_timeout_s``."""
        unsent = self.transport.get_write_buffer_size()
        # Then nothing is added to what is unsent, and it stays the same only if nothing is taken.
        waits = self.is_idle or self.flow.write_paused or self.transport.is_closing()
        self._still = self._still + 1 if waits and unsent and unsent == self._unsent else 0
        self._unsent = unsent
        if self._still >= CHECKS:
            self.transport.abort()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # What comes

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self.is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.bounds.head_timeout_s, self._head_too_late)
        if len(data) < self._room:
            self._room -= len(data)
            super().data_received(data)
        else:
            self._feed_pieces(memoryview(data))

    def _feed_pieces(self, data: memoryview) -> None:
        # The parser joins all pieces of a value each time one comes, so it must not get them.
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
        version = self.parser.get_http_version()
        if (problem := _problem_of(version, self.url, self.headers)) is not None:
            self._give_up(problem)
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

    def _give_up(self, problem: RequestError) -> None:
        """Stop the parser, which has the problem answered by :meth:`send_400_response`."""
        self._problem = problem
        raise ValueError(problem.message)

    # What is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.served = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(cycle, app)
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
        self.idle_since = self.loop.time()
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
        if self.is_idle:
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
        """End the connection after what has been written, without a reset."""
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


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application for HTTP/1.0: without chunks, an answer of unknown length ends by closing."""

    def run(scope: Scope, receive: Receive, send: Send) -> Any:
        has_length = True

        def send_plainly(message: Message) -> Any:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_length = b"content-length" in names
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        return app(scope, receive, send_plainly)

    return run


def _problem_of(
    version: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> BadRequest | None:
    """What the parser lets pass and RFC 9112 does not, or what has two meanings; None: nothing."""
    if version not in _VERSIONS:
        return BadRequest(f"This server speaks HTTP/1.1, not {version}.")
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in given and name in ONCE:
            return BadRequest(f"A request has one {name.decode().title()} header.")
        given[name] = value
    coding = given.get(b"transfer-encoding")
    if coding is not None and (version, coding.lower()) != ("1.1", b"chunked"):
        return BadRequest("The only Transfer-Encoding is chunked, of HTTP/1.1.")
    host = given.get(b"host")
    if host is None and version == "1.1":
        return BadRequest("A request has one Host header.")
    return None if target.startswith(b"/") else _problem_of_url(target, host)


def _problem_of_url(target: bytes, host: bytes | None) -> BadRequest | None:
    """A target that is no path may be a URL of the server that ``Host`` names."""
    scheme, _, rest = target.partition(b"://")
    port = _PORTS.get(scheme.lower())
    authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    if port is None:
        return BadRequest("The request's target is no path, such as /v1/models.")
    if host is None or _with_port(authority, port) != _with_port(host, port):
        return BadRequest("The request's target names another server than its Host header.")
    return None


def _with_port(authority: bytes, port: bytes) -> bytes:
    """An authority in lower case with its port, which may be the scheme's own."""
    authority = authority.lower().removesuffix(b":")
    return authority if re.search(rb":\d+$", authority) else authority + port


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def too_many(what: str) -> Unavailable:
    return Unavailable(f"{what}; try again shortly", reason="too_many_connections", retry_after_s=1)


class AddressLimit:
    """Counts connections by client: an IPv4 address, or an IPv6 network, which one client has."""

    def __init__(self, most: int, *, spare_loopback: bool, counts: Counts | None = None) -> None:
        """``most``: connections of one client; ``spare_loopback``: any number on this machine;
        ``counts``: connections to other gateway processes."""
        self.most = most
        self._spare_loopback = spare_loopback
        self._open: Counter[str] = Counter()
        self._counts = counts or Counts()

    def enter(self, address: str) -> None:
        client = _client(address)
        self._open[client] += 1
        self._counts.add_connections(client, 1)

    def leave(self, address: str) -> None:
        client = _client(address)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
        self._counts.add_connections(client, -1)

    def open(self, address: str) -> int:
        """Connections of an address's client that count."""
        client = _client(address)
        if self._spare_loopback and is_loopback(client):
            return 0
        return self._open[client] + self._counts.connections_elsewhere(client)

    @property
    def elsewhere(self) -> int:
        """Connections of all clients to other gateway processes."""
        return self._counts.all_connections_elsewhere


def _client(address: str) -> str:
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    if ip.ipv4_mapped or ip.is_loopback:
        return str(ip.ipv4_mapped or ip)
    return str(ipaddress.IPv6Network((ip, _IPV6_NETWORK), strict=False))
