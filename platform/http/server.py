"""A uvicorn server in a Serve replica's event loop, which accepts connections within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Generator
from functools import partial
from heapq import nsmallest
from typing import Any, NoReturn

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.base.descriptors import for_clients
from loomserve.platform.base.errors import Forbidden, Unavailable
from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
from loomserve.platform.http.protocol import CHECKS, BoundedProtocol, Bounds, too_many
from loomserve.platform.http.tls import LiveCertificate

_BACKLOG = 2048
_POLL_INTERVAL_S = 1.0
# Without file descriptors for more, trying again at once would only keep the processor busy.
_RETRY_S = 0.1
# Accepted before others have their turn.
_BURST = 16
# A connection that has had an answer is kept for the client's next request for so long at least.
_KEPT_S = 5.0
# Of all connections so many give way at once, since the search for them passes over all.
_GIVE_WAY = 1 / 32


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Signals belong to Ray; uvicorn would end the replica's process behind Serve's back.
        yield


class HttpServer:
    """HTTP server of an ASGI app on a socket, within bounds, from :meth:`start` to :meth:`stop`.

    asyncio's server would accept connections before they are counted, with all file descriptors,
    and hide handshakes. So this one accepts them, and gives them to uvicorn's protocol after the
    handshake. Where there are too many, those without a request give way, the oldest first, before
    a client is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        bounds: Bounds,
        certificate: LiveCertificate | None = None,
    ) -> None:
        """``certificate``: None, the server speaks HTTP in clear text."""
        self._socket, self._bounds, self._certificate = sock, bounds, certificate
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        # Connections that count, among them those that shake hands, with their clients' addresses.
        self._there: dict[BoundedProtocol, str] = {}
        # Those that their protocols do not have yet.
        self._opening: dict[BoundedProtocol, asyncio.Task[None]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._accepting: list[asyncio.Task[None]] = []
        self._looking: list[asyncio.Task[NoReturn]] = []

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._accepting = [asyncio.create_task(self._accept())]
        if self._certificate is not None:
            self._accepting.append(asyncio.create_task(every(_POLL_INTERVAL_S, self._refresh)))
        if (send_timeout_s := self._bounds.send_timeout_s) is not None:
            self._looking = [asyncio.create_task(every(send_timeout_s / CHECKS, self._look))]

    @property
    def alive(self) -> bool:
        tasks: list[asyncio.Task[Any] | None] = [self._serving, *self._accepting, *self._looking]
        return all(task is not None and not task.done() for task in tasks)

    async def stop(self, timeout_s: float) -> None:
        """Accept no connection, give open requests ``timeout_s`` seconds, then cut them."""
        # Connections that have shaken hands stay.
        ending = [*self._accepting, *self._opening.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._socket.close()
        self._server.config.timeout_graceful_shutdown = max(1, int(timeout_s))
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        for looking in self._looking:
            looking.cancel()

    async def _look(self) -> None:
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, BoundedProtocol)
            connection.look()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:
                self._make_room()
                await asyncio.sleep(_RETRY_S)
                continue
            address = peer[0] if peer else ""
            refusal = self._refusal(connection, address)
            if refusal is None or self._certificate is None:
                self._open(connection, address, refusal)
            else:
                # There is no way to say why before hands are shaken.
                connection.close()
            accepted += 1
            # What gives way, or is refused, has its descriptor until then.
            if accepted % _BURST == 0 or refusal is not None or len(self._there) >= self._room:
                await asyncio.sleep(0)

    @property
    def _room(self) -> int:
        most = self._bounds.max_connections
        return for_clients() if most is None else most

    def _refusal(self, connection: socket.socket, address: str) -> Unavailable | None:
        by_address = self._bounds.by_address
        if by_address is not None and by_address.open(address) >= by_address.most:
            return too_many(f"your address already has {by_address.most} connections")
        elsewhere = by_address.elsewhere if by_address is not None else 0
        there = len(self._there) + elsewhere
        # A new descriptor has the lowest number that is free.
        is_full = there >= self._room or connection.fileno() >= for_clients()
        if is_full and not self._make_room():
            return too_many(f"the server already has {there} connections")
        return None

    def _make_room(self) -> bool:
        """Close connections without a request; False: there is none."""
        now_s = asyncio.get_running_loop().time()
        ranks = {each: rank for each in self._there if (rank := _rank(each, now_s))}
        oldest = nsmallest(1 + int(_GIVE_WAY * len(ranks)), ranks, key=ranks.__getitem__)
        for each in oldest:
            self._ended(each)
            opening = self._opening.get(each)
            if opening is None:
                each.give_way()
            else:
                opening.cancel()
        return bool(oldest)

    def _open(self, connection: socket.socket, address: str, refusal: Unavailable | None) -> None:
        protocol = BoundedProtocol(
            self._bounds,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )
        protocol.refusal, protocol.ended = refusal, self._ended
        if refusal is None:
            self._there[protocol] = address
            if self._bounds.by_address is not None:
                self._bounds.by_address.enter(address)
        opening = asyncio.create_task(self._hand_over(connection, protocol))
        self._opening[protocol] = opening
        opening.add_done_callback(partial(self._opened, protocol))

    def _opened(self, protocol: BoundedProtocol, _: asyncio.Task[None]) -> None:
        del self._opening[protocol]
        if protocol.transport is None:
            self._ended(protocol)

    def _ended(self, protocol: BoundedProtocol) -> None:
        address = self._there.pop(protocol, None)
        if address is not None and self._bounds.by_address is not None:
            self._bounds.by_address.leave(address)

    async def _hand_over(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        timeout_s = self._bounds.head_timeout_s if self._certificate is not None else None
        # What fails is the client's: it speaks no TLS, does not trust us, or is gone.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._certificate.context if self._certificate is not None else None,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )

    async def _refresh(self) -> None:
        assert self._certificate is not None
        self._certificate.refresh()


def _rank(connection: BoundedProtocol, now_s: float) -> tuple[bool, float] | None:
    """A connection's place among those to close for new clients, lowest first; None: it is busy."""
    shaken = connection.transport is not None
    if shaken and (not connection.is_idle or connection.transport.get_write_buffer_size()):
        return None
    used = connection.served is not None
    if used and now_s - connection.idle_since < _KEPT_S:
        return None
    return used, connection.idle_since


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket. ``port`` 0 takes a free one; ``shared`` lets several processes bind
    it. Raises OSError, which names the address, if it is in use or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small writes at once only if the socket says that it is of TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    sock.set_inheritable(False)
    return sock


class GuardedApp:
    """ASGI application that asks for the internal token, and counts its open requests."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self.open_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No process of the platform speaks it, so a handshake must not slip past the token.
            await send({"type": "websocket.close", "code": 1008})
            return
        presented = dict(scope["headers"]).get(INTERNAL_TOKEN_HEADER.encode(), b"")
        if not hmac.compare_digest(presented, self._token):
            error = Forbidden("this port is for the gateway; ask the server's own address")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        self.open_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1
