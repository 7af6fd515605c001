"""The bounds below ASGI, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loomserve.platform.http.protocol import Bounds
from loomserve.platform.http.server import HttpServer, listen
from tests.waiting import PATIENCE_S

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


@asynccontextmanager
async def serving(head_timeout_s: float = 0.3, max_connections: int = 10) -> AsyncIterator[Connect]:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    app = Starlette(routes=[Route("/", hello)])
    server = HttpServer(app, sock, bounds=Bounds(head_timeout_s, max_connections))
    await server.start()
    try:
        yield lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        await server.stop(1)


async def until_closed(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_head_that_never_ends_is_answered_408_and_cut() -> None:
    async def check() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nHo")
            status, error = await until_closed(reader)
            assert (status, error["code"]) == (408, "timeout")
            writer.close()

    asyncio.run(check())


def test_a_silent_connection_may_come_ahead_of_its_request() -> None:
    async def check() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            await asyncio.sleep(0.6)
            writer.write(GET)
            assert b"hello" in await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
            await asyncio.sleep(0.6)  # and so may the next request on a kept connection
            writer.write(GET)
            assert b"hello" in await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
            writer.close()

    asyncio.run(check())


def test_a_slow_second_request_on_a_kept_connection_is_cut_too() -> None:
    async def check() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            writer.write(GET)
            await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
            writer.write(b"GET / HT")
            status, _ = await until_closed(reader)
            assert status == 408
            writer.close()

    asyncio.run(check())


def test_one_client_too_many_is_answered_503_and_the_others_go_on() -> None:
    async def check() -> None:
        async with serving(max_connections=2) as connect:
            clients = [await connect() for _ in range(2)]
            for reader, writer in clients:
                writer.write(GET)
                await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
            reader, writer = await connect()
            status, error = await until_closed(reader)
            assert (status, error["code"]) == (503, "too_many_connections")
            writer.close()
            clients[0][1].write(GET)
            await asyncio.wait_for(clients[0][0].readuntil(b"hello"), PATIENCE_S)
            for _, writer in clients:
                writer.close()

    asyncio.run(check())


def test_what_is_not_http_is_answered_in_openais_shape() -> None:
    async def check() -> None:
        async with serving() as connect:
            reader, writer = await connect()
            writer.write(b"\x16\x03\x01 this is TLS\r\n\r\n")
            status, error = await until_closed(reader)
            assert (status, error["type"]) == (400, "invalid_request_error")
            writer.close()

    asyncio.run(check())
