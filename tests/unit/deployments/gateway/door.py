"""A gateway's door, its way to the batch lane and the lane, over real connections."""

from __future__ import annotations

import asyncio
import fcntl
import json
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from loomserve.deployments.batch.proxy import BATCHES, FILES, BatchProxy
from loomserve.platform.access.keys import hash_key
from loomserve.platform.batch.http.api import BatchApi
from loomserve.platform.batch.policy.objects import INPUT, FileRecord
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.protocol import INTERNAL, Bounds
from tests.unit.deployments.batch.test_proxy import Lane
from tests.unit.platform.batch.test_lane import Bench, Engines
from tests.unit.platform.http.raw import RawServer, Streams, serving

TOKEN = "internal"
OWNERS = ("alice", "bob")
SECRETS = {name: f"sk-loom-{name}-" + "k" * 32 for name in (*OWNERS, "admin")}
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def file_names(self) -> set[str]:
        """Names in a list of files."""
        return {file["filename"] for file in json.loads(self.body)["data"]}


class Client:
    """A connection to the door that writes requests as it likes."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams

    async def ask(self, method: str, target: str, who: str, rest: bytes = b"\r\n") -> Answer:
        """``rest``: what follows the fields that every request has."""
        self.writer.write(
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {SECRETS[who]}\r\n".encode()
            + rest
        )
        return await self.read(method)

    async def read(self, method: str) -> Answer:
        async with asyncio.timeout(_PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *fields = head.decode().strip().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (each.partition(": ") for each in fields)
            }
            body = b"" if method == "HEAD" else await self._body(headers)
            return Answer(int(line.split()[1]), headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def is_at_end(self) -> bool:
        """Wait for the connection's end; whether nothing came before it."""
        return await asyncio.wait_for(self.reader.read(), _PATIENCE_S) == b""


@dataclass(frozen=True)
class Door:
    gateway: RawServer
    lane: RawServer
    files: dict[str, str]
    """Each owner's one file."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(await self.gateway.connect())
        try:
            yield client
        finally:
            client.writer.close()

    @property
    def unread(self) -> int:
        """Bytes that the lane has, or waits for, beyond the requests that it has answered."""
        waiting = 0
        for connection in self.lane.connections:
            number = connection.transport.get_extra_info("socket").fileno()
            waiting += struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0" * 4))[0]
            waiting += connection.cycle is not None and connection.cycle.more_body
        return waiting


async def _echo(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


@asynccontextmanager
async def open_door(folder: Path) -> AsyncIterator[Door]:
    """All requests to the lane go over one kept connection."""
    bench = Bench(folder, Engines())
    files = {name: f"file-{name}" for name in OWNERS}
    for owner, file_id in files.items():
        bench.folder.blob(file_id).write_text(f"this is {owner}'s")
        bench.store.files.add(
            FileRecord(
                id=file_id, owner=owner, filename=owner, purpose=INPUT, bytes=10, created_at=1
            )
        )
    api = BatchApi(bench.make(), bench.store, bench.folder, bench.options)
    server = Server.model_validate(
        {
            "api_keys": [{"name": name, "hash": hash_key(SECRETS[name])} for name in OWNERS],
            "admin_token_hash": hash_key(SECRETS["admin"]),
        }
    )
    async with (
        serving(api.app(TOKEN), INTERNAL) as lane,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session,
    ):
        proxy = BatchProxy(
            Lane(f"127.0.0.1:{lane.port}"),  # type: ignore[arg-type]
            session,
            TOKEN,
            max_file_bytes=2**20,
            idle_timeout_s=2,
        )
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", _echo, methods=["POST"]),
                *(Route(root, proxy) for root in (FILES, BATCHES)),
                *(Route(root + "/{rest:path}", proxy) for root in (FILES, BATCHES)),
                Mount("/admin/v1", Starlette(routes=[Route("/state", _echo)])),
            ],
            exception_handlers=exception_handlers,
        )
        door = ingress_middleware(app, server, rejected=lambda _: None, streamed=frozenset({FILES}))
        async with serving(door, Bounds(head_timeout_s=5)) as gateway:
            yield Door(gateway, lane, files)
    bench.store.close()
    bench.folder.release()
