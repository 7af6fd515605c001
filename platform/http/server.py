"""A uvicorn server that runs in a Serve replica's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from loomserve.platform.base.periodic import every
from loomserve.platform.http.listener import ConnectionListener
from loomserve.platform.http.protocol import LOOKS, BoundedProtocol
from loomserve.platform.http.tls import LiveCertificate


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Signals belong to Ray; uvicorn would end the replica's process behind Serve's back.
        yield


class HttpServer:
    """HTTP server of an ASGI app on a socket, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        protocol: type[BoundedProtocol],
        certificate: LiveCertificate | None = None,
    ) -> None:
        """``certificate``: None, the server speaks HTTP in clear text."""
        self._protocol = protocol
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                http=protocol,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        self._listener = ConnectionListener(
            sock, protocol.bounds, certificate, self._new_connection
        )
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[NoReturn] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        self._listener.start()
        send_timeout_s = self._protocol.bounds.send_timeout_s
        if send_timeout_s is not None:
            self._looking = asyncio.create_task(every(send_timeout_s / LOOKS, self._look))

    @property
    def alive(self) -> bool:
        looking = self._looking is None or not self._looking.done()
        return self._listener.alive and looking and self._task is not None and not self._task.done()

    async def stop(self, timeout_s: float) -> None:
        """Accept no connection, give open requests ``timeout_s`` seconds, then cut them."""
        await self._listener.close()
        self._server.config.timeout_graceful_shutdown = max(1, int(timeout_s))
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, BoundedProtocol)
            connection.look()

    def _new_connection(self) -> BoundedProtocol:
        return self._protocol(
            config=self._server.config, server_state=self._server.server_state, app_state={}
        )


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket. ``port`` 0 takes a free one; ``shared`` lets several processes bind it.

    Raises:
        OSError: the address, which it names, is in use, or is not of this machine.
    """
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
