"""A real server on loopback, and clients that write bytes as they like."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from loomserve.platform.http.protocol import BoundedProtocol, Bounds
from loomserve.platform.http.server import HttpServer, listen
from tests.waiting import PATIENCE_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class RawServer:
    """A server, and what a test asks of it."""

    def __init__(self, app: ASGIApp, bounds: Bounds, sock: socket.socket) -> None:
        self.port = int(sock.getsockname()[1])
        self.http = HttpServer(app, sock, bounds=bounds)

    @property
    def connections(self) -> list[BoundedProtocol]:
        found = self.http._server.server_state.connections
        return [each for each in found if isinstance(each, BoundedProtocol)]

    async def connect(self, own_address: str = "127.0.0.1") -> Streams:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(own_address, 0), limit=2**24
        )

    async def ask(self, raw: bytes) -> bytes:
        """All that the server says to ``raw`` until it closes the connection."""
        reader, writer = await self.connect()
        writer.write(raw)
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        finally:
            writer.close()

    async def statuses(self, raw: bytes) -> list[int]:
        """The statuses of the answers to ``raw`` and to one more request, which ends it."""
        return [int(status) for status in _STATUS.findall(await self.ask(raw + _LAST))]


@asynccontextmanager
async def serving(
    app: ASGIApp, bounds: Bounds | None = None, send_buffer: int | None = None
) -> AsyncIterator[RawServer]:
    """``send_buffer``: bytes that the kernel takes off the server for a client."""
    sock = listen("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = RawServer(app, bounds or Bounds(head_timeout_s=5), sock)
    await server.http.start()
    try:
        yield server
    finally:
        await server.http.stop(1)
