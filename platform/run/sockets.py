"""Sockets of the platform's own processes: how they are made, addressed and reached.

Engines' replicas and the batch lane listen on Unix sockets in the run's folder, where no other user
and no other machine comes. An address is ``NAME.NODE``: the socket's name and its node's address.
In a URL it stands in the place of a host.
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

from loomserve.platform.run.folder import own_run

if TYPE_CHECKING:
    from aiohttp import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace


def listen_locally(name: str, node: str) -> tuple[socket.socket, str]:
    """A bound socket, and its address.

    Args:
        name: What listens; several may have the same.
        node: Address of this node.
    """
    unique = f"{name}-{secrets.token_hex(4)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(_path(unique)))
    return sock, f"{unique}.{node}"


def listen_in_place(name: str, node: str) -> tuple[socket.socket, str]:
    """The same, in the place of one of that very name that was left by a process that ended."""
    path = _path(name)
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    return sock, f"{name}.{node}"


def node_of(address: str) -> str:
    """The node at which an address is."""
    return address.partition(".")[2]


class LocalConnector(aiohttp.BaseConnector):
    """Connector that reaches addresses of this node, and nothing else.

    So the internal token cannot leave the machine, whatever address a replica reports.
    """

    def __init__(self, *, force_close: bool = False, keepalive_timeout: float | None = 60) -> None:
        super().__init__(
            limit=0,
            force_close=force_close,
            keepalive_timeout=None if force_close else keepalive_timeout,
        )

    async def _create_connection(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: ClientTimeout,  # noqa: ASYNC109 - as aiohttp calls it
    ) -> ResponseHandler:
        path = str(_path(str(req.url.host).partition(".")[0]))
        protocol = partial(ResponseHandler, loop=self._loop)
        try:
            async with asyncio.timeout(timeout.sock_connect):
                _, connected = await self._loop.create_unix_connection(protocol, path)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"{path} does not accept connections") from error
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        return connected


def _path(name: str) -> Path:
    return own_run().sockets / name
