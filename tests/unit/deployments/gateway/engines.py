"""Small HTTP servers in the place of engines, which end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from ray.serve.exceptions import DeploymentUnavailableError

from loomserve.deployments.gateway.forward import Forwarder
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.run.sockets import listen_locally
from loomserve.routers.base import Replica
from loomserve.routers.ticket import RoutingTicket

GOOD = b'{"good": true}'
Behave = Callable[["Engine", bytes], Awaitable[bytes | None]]


def answered(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def good(engine: Engine, body: bytes) -> bytes:
    return answered(200, GOOD)


async def dies(engine: Engine, body: bytes) -> None:
    """End like a process: no more connections, and those that there are break."""
    await engine.end()


class Engine:
    """A server that counts what it is asked; ``behave`` gives the bytes of each answer."""

    def __init__(self, name: str, behave: Behave) -> None:
        self.name = name
        self.behave = behave
        self.asked: list[bytes] = []
        self.connections = 0
        self.dead = False
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        sock, self.address = listen_locally(self.name, "127.0.0.1")
        self._server = await asyncio.start_server(self._serve, sock=sock)

    async def end(self) -> None:
        self.dead = True
        self._server.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(length)
                self.asked.append(body)
                answer = await self.behave(self, body)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._writers.discard(writer)


class Model:
    """Serve's handle of a model: the engines in turn, without those that the ticket excludes."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.tickets: list[RoutingTicket] = []

    @asynccontextmanager
    async def choose_replica(
        self, ticket: RoutingTicket, _reserve: bool
    ) -> AsyncIterator[SimpleNamespace]:
        self.tickets.append(ticket)
        for engine in self.engines:
            pinned = ticket.pinned_to in (None, engine.name)
            if pinned and engine.name not in ticket.exclude:
                ticket.book(Replica(engine.name))
                where = {"address": engine.address}
                yield SimpleNamespace(replica_id=engine.name, replica_metadata=where)
                return
        raise DeploymentUnavailableError("none")


@asynccontextmanager
async def gateway(
    *behaviours: Behave, idle_timeout_s: float = 60
) -> AsyncIterator[tuple[Forwarder, Any, list[Engine]]]:
    """A real forwarder, the handle of a model, and its engines."""
    engines = [Engine(f"r{n}", behave) for n, behave in enumerate(behaviours, 1)]
    for engine in engines:
        await engine.start()
    metrics = GatewayMetrics(CollectorRegistry())
    forwarder = Forwarder("token", metrics, idle_timeout_s=idle_timeout_s)
    try:
        yield forwarder, Model(engines), engines
    finally:
        await forwarder.close()
        for engine in engines:
            await engine.end()
