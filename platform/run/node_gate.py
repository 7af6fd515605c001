"""Lets processes of other nodes reach a Unix socket of this one, over TCP.

The gate passes bytes to the socket, of those who show that they belong to the platform.
"""

from __future__ import annotations

import asyncio
import contextlib

from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.run.engine_address import node_of
from loomserve.platform.run.lost_peers import notice_loss
from loomserve.platform.run.node_identity import server_context
from loomserve.platform.run.sockets import path_of

_HANDSHAKE_TIMEOUT_S = 5.0
_PIECE = 2**16
_MOST_CONNECTIONS = 512


class NodeGate:
    """From :meth:`open` to :meth:`close`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.address: str
        """As :func:`~loomserve.platform.run.sockets.listen_locally` makes it, with the port."""

    @classmethod
    async def open(cls, address: str, internal_token: str) -> NodeGate:
        """A gate to the socket at an address of this node; on loopback it opens nothing."""
        gate = cls(str(path_of(address)))
        gate.address = address
        node = node_of(address)
        if not is_loopback(node):
            gate._server = await asyncio.start_server(
                gate._accept,
                node,
                0,
                ssl=server_context(internal_token),
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=_HANDSHAKE_TIMEOUT_S,
            )
            gate.address = f"{address}:{gate._server.sockets[0].getsockname()[1]}"
        return gate

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            notice_loss(writer.get_extra_info("socket"))
            if len(self._open) <= _MOST_CONNECTIONS:
                await self._pass(reader, writer)
        except OSError:
            pass  # either end is gone, and with it the connection
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, inner_writer))
                both.create_task(_pump(inner_reader, writer))
        except* OSError:
            pass
        finally:
            inner_writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()
    # HTTP ends a connection as a whole, and TLS knows no half of one.
    sink.close()
    with contextlib.suppress(OSError):
        await sink.wait_closed()
