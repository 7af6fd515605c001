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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from loomserve.platform.run.engine_address import node_of
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.lost_peers import notice_loss
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
