"""The ports at which a gateway takes requests: that of clients, and that of operators alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.access.shared_counts import Counts
from loomserve.platform.base.descriptors import connections_that_fit, raise_limit
from loomserve.platform.config import Server
from loomserve.platform.http.ingress.middleware import FOR_CLIENTS
from loomserve.platform.http.protocol import AddressLimit, Bounds
from loomserve.platform.http.server import HttpServer, listen
from loomserve.platform.http.tls import LiveCertificate


class Listeners:
    """HTTP servers of one application at all ports; a crowd of clients keeps no operator out."""

    def __init__(self, app: ASGIApp, server: Server, counts: Counts) -> None:
        """``counts``: connections to other gateway processes. Raises OSError for a bad address."""
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
                app if alone else _for_clients(app), sockets[0], server, certificate, counts
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
        """Stop; :attr:`drains` says that this process is healthy all the same."""
        self.drains = True
        await self.stop()

    async def stop(self) -> None:
        """Accept no connection, give open requests ``drain_timeout_s``, then cut them."""
        await asyncio.gather(*(each.stop(self._drain_timeout_s) for each in self._servers))


def _for_clients(app: ASGIApp) -> ASGIApp:
    """Tells the ingress middleware in ``app`` that requests came by the port for clients."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope[FOR_CLIENTS] = True
        await app(scope, receive, send)

    return marked


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
    return HttpServer(app, sock, bounds=bounds, certificate=certificate)
