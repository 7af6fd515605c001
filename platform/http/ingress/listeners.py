"""The ports at which a gateway takes requests: that of clients, and that of operators alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.access.shared_counts import Counts
from loomserve.platform.base.descriptors import connections_that_fit, raise_limit
from loomserve.platform.config import Server
from loomserve.platform.http.address_limit import AddressLimit
from loomserve.platform.http.ingress.middleware import FOR_CLIENTS
from loomserve.platform.http.protocol import Bounds, bounded_protocol
from loomserve.platform.http.server import HttpServer, listen
from loomserve.platform.http.tls import LiveCertificate


class Listeners:
    """HTTP servers of one application at all ports of a server's, each with bounds of its own: a
    crowd of clients keeps no operator out."""

    def __init__(self, app: ASGIApp, server: Server, counts: Counts) -> None:
        """
        Args:
            app: the platform within its ingress middleware.
            server: the configuration.
            counts: connections to clients' ports of other front ends.

        Raises:
            OSError: an address is in use, or is not of this machine.
        """
        # Where the command has not, as in Kubernetes' pods.
        raise_limit()
        most = connections_that_fit(server.max_connections, len(server.ports))
        server = server.model_copy(update={"max_connections": most})
        certificate = LiveCertificate(server.tls) if server.tls is not None else None
        self.drains = False
        self._drain_timeout_s = server.drain_timeout_s
        alone = server.admin_port is None
        sockets = _listen(server)
        self._servers = [
            _http_server(
                app if alone else _ForClients(app), sockets[0], server, certificate, counts
            ),
            *(_http_server(app, sock, server, certificate) for sock in sockets[1:]),
        ]

    async def start(self) -> None:
        for each in self._servers:
            await each.start()

    @property
    def alive(self) -> bool:
        return all(each.alive for each in self._servers)

    async def drain(self) -> None:
        """Stop, while whoever looks after this process is to let it be."""
        self.drains = True
        await self.stop()

    async def stop(self) -> None:
        """Accept no connection, give open requests ``drain_timeout_s``, then cut them."""
        await asyncio.gather(*(each.stop(self._drain_timeout_s) for each in self._servers))


class _ForClients:
    """ASGI application that tells the ingress middleware in it by which port a request came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FOR_CLIENTS] = True
        await self._app(scope, receive, send)


def _listen(server: Server) -> list[socket.socket]:
    """Bound sockets at all ports, or none."""
    with contextlib.ExitStack() as bound:
        sockets = [
            bound.enter_context(listen(server.host, port, shared=True)) for port in server.ports
        ]
        bound.pop_all()
    return sockets


def _http_server(
    app: ASGIApp,
    sock: socket.socket,
    server: Server,
    certificate: LiveCertificate | None,
    counts: Counts | None = None,
) -> HttpServer:
    by_address = AddressLimit(
        server.max_connections_per_address or max(1, server.max_connections // 4),
        spare_loopback=server.max_connections_per_address is None,
        counts=counts,
    )
    bounds = Bounds(
        head_timeout_s=server.header_timeout_s,
        max_connections=server.max_connections,
        by_address=by_address,
        send_timeout_s=server.send_timeout_s,
    )
    return HttpServer(app, sock, protocol=bounded_protocol(bounds), certificate=certificate)
