"""Sockets of the platform's own processes: how they are made, addressed and reached.

Engines' replicas and the batch lane listen on Unix sockets in the run's folder, where no other user
and no other machine comes. An address is ``NAME.NODE``: the socket's name and its node's address.
In a URL it stands in the place of a host. With ``:PORT`` the socket is reached from other nodes
too, through a :class:`~loomserve.platform.run.node_gate.NodeGate`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil
from aiohttp.client_proto import ResponseHandler

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.run.engine_address import node_of
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.node_identity import client_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace


def listen_locally(name: str, node: str) -> tuple[socket.socket, str]:
    """A bound socket, and its address. Several may have the same ``name``."""
    unique = f"{name}-{secrets.token_hex(4)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(_path(unique)))
    return sock, f"{unique}.{node}"


def listen_in_place(name: str, node: str) -> tuple[socket.socket, str]:
    """The same, in the place of one of that very name that a process left which ended."""
    path = _path(name)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    return sock, f"{name}.{node}"


def path_of(address: str) -> Path:
    """The socket of an address of this node."""
    return _path(address.partition(".")[0])


class PlatformConnector(aiohttp.BaseConnector):
    """Connector that reaches sockets of the platform's processes, and nothing else.

    Those of this node are reached as Unix sockets, and those of others with an internal token only:
    who has not got it cannot be connected to, whatever address is reported.
    """

    def __init__(
        self,
        internal_token: str | None = None,
        *,
        force_close: bool = False,
        keepalive_timeout: float | None = 60,
    ) -> None:
        super().__init__(
            limit=0,
            force_close=force_close,
            keepalive_timeout=None if force_close else keepalive_timeout,
        )
        self._internal_token = internal_token

    async def _create_connection(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: ClientTimeout,  # noqa: ASYNC109 - as aiohttp calls it
    ) -> ResponseHandler:
        address = str(req.url.host)
        protocol = partial(ResponseHandler, loop=self._loop)
        try:
            async with asyncio.timeout(timeout.sock_connect):
                return await self._connected(protocol, address, req.url.explicit_port)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"{address} takes no connection") from error
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error

    async def _connected(
        self, protocol: Callable[[], ResponseHandler], address: str, port: int | None
    ) -> ResponseHandler:
        path = path_of(address)
        if port is None or self._internal_token is None or path.exists():
            return (await self._loop.create_unix_connection(protocol, str(path)))[1]
        transport, connected = await self._loop.create_connection(
            protocol, node_of(address), port, ssl=client_context(self._internal_token)
        )
        notice_loss(transport.get_extra_info("socket"))
        return connected


def _path(name: str) -> Path:
    return own_run().sockets / name


LOSS_S = 5
"""A connection whose other end is silent for so long is given up."""


def notice_loss(sock: socket.socket, seconds: int = LOSS_S) -> None:
    """Have the kernel give a TCP connection up whose other end is silent for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds // 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def check_listening(
    processes: Iterable[psutil.Process], server_ports: Collection[int], node: str | None = None
) -> None:
    """Check that nothing but the server listens beyond loopback, or the cluster's network.
    ``processes`` are the platform's on this machine, and ``node`` its address in the cluster's
    network. ``StartError`` says which process and port do."""
    found = "; ".join(_elsewhere(processes, server_ports, node))
    if found:
        raise StartError(
            f"other machines could reach what is for the platform alone: {found}. Install the "
            "versions of Ray and vLLM that Loomserve was tested with (make install)"
        )


def _elsewhere(
    processes: Iterable[psutil.Process], server_ports: Collection[int], node: str | None
) -> Iterator[str]:
    for process in processes:
        try:
            name, sockets = process.name(), process.net_connections("tcp")
        except psutil.Error:  # it has just ended
            continue
        for one in sockets:
            listens = one.status == psutil.CONN_LISTEN and one.laddr.port not in server_ports
            if listens and not is_loopback(one.laddr.ip) and one.laddr.ip != node:
                yield f"process {process.pid} ({name}) listens on {one.laddr.ip}:{one.laddr.port}"
