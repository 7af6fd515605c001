"""Clients that do not read, say nothing, or send on after their answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.access.keys import hash_key
from loomserve.platform.config import Server
from loomserve.platform.http.asgi import ClientGoneError, while_connected
from loomserve.platform.http.ingress import ingress_middleware
from loomserve.platform.http.protocol import AddressLimit, Bounds
from tests.unit.platform.http.raw import serving
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SEND_TIMEOUT_S = 0.5
REQUEST_TIMEOUT_S = 2.0
# More of them in the test's own event loop would be late on a busy machine, as would be all others.
STOPPED = 60


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body."""
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"who? "})


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/v1/short":
        await hello(scope, receive, send)
        return
    with contextlib.suppress(ClientGoneError):
        await while_connected(stream_on(send), receive)


async def stream_on(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        await send({"type": "http.response.body", "body": b"data: x\n\n" * 100, "more_body": True})
        await asyncio.sleep(0)


def stops_reading(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.connect(("127.0.0.1", port))
    return sock


async def read_one_event(sock: socket.socket) -> None:
    come = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"data: x" not in come:
            come += await asyncio.get_running_loop().sock_recv(sock, 4096)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_streams_that_nobody_reads_are_gone_by_the_limit_and_others_are_served() -> None:
    key = "sk-loom-" + "k" * 32
    server = Server.model_validate(
        {
            "request_timeout_s": REQUEST_TIMEOUT_S,
            "api_keys": [{"name": "k", "hash": hash_key(key), "max_concurrent": STOPPED + 1}],
        }
    )
    app = ingress_middleware(stream, server, rejected=lambda _: None)
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n"
    loop = asyncio.get_running_loop()
    bounds = Bounds(head_timeout_s=5, send_timeout_s=SEND_TIMEOUT_S)
    async with serving(app, bounds, send_buffer=4096) as served:
        stopped = [stops_reading(served.port) for _ in range(STOPPED)]
        try:
            ask = (head.format("/v1/long", key) + "Content-Length: 0\r\n\r\n").encode()
            for sock in stopped:
                await loop.sock_sendall(sock, ask)
            for sock in stopped:
                await read_one_event(sock)
            # All places but one are taken, and that one is there for others all the time.
            short = (
                head.format("/v1/short", key) + "Content-Length: 0\r\nConnection: close\r\n\r\n"
            ).encode()
            until_s = loop.time() + PATIENCE_S
            while served.connections and loop.time() < until_s:
                assert b"hello" in await served.ask(short)
                await asyncio.sleep(0.05)
            assert served.connections == []
            # So are the places of the key.
            answers = await asyncio.gather(*(served.ask(short) for _ in range(50)))
            assert all(b"hello" in answer for answer in answers)
        finally:
            for sock in stopped:
                sock.close()


async def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    size = 2**20

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    loop = asyncio.get_running_loop()
    bounds = Bounds(head_timeout_s=5, send_timeout_s=SEND_TIMEOUT_S)
    async with serving(much, bounds, send_buffer=4096) as served:
        sock = stops_reading(served.port)
        await loop.sock_sendall(sock, GET)
        read, began_s = 0, loop.time()
        while loop.time() - began_s < 3 * SEND_TIMEOUT_S:
            read += len(await loop.sock_recv(sock, 8192))
            await asyncio.sleep(SEND_TIMEOUT_S / 50)
        assert 0 < read < size, "it takes longer than the limit"
        while chunk := await loop.sock_recv(sock, 2**16):
            read += len(chunk)
            if read > size:
                break
        assert read > size
        sock.close()


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_an_answer_that_is_whole_but_not_taken_does_not_hold_its_connection(
    connection: bytes,
) -> None:
    size = 60_000  # so little that nobody waits until it is taken

    async def some(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(size).encode()), (b"connection", connection)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    loop = asyncio.get_running_loop()
    bounds = Bounds(head_timeout_s=5, send_timeout_s=SEND_TIMEOUT_S)
    async with serving(some, bounds, send_buffer=4096) as served:
        sock = stops_reading(served.port)
        await loop.sock_sendall(sock, GET)
        await until(lambda: len(served.connections) == 1)
        await until(lambda: not served.connections)
        sock.close()


async def test_silent_clients_of_one_address_leave_room_for_others() -> None:
    limit = AddressLimit(16, spare_loopback=False)
    # They stay silent until the end.
    bounds = Bounds(head_timeout_s=3 * PATIENCE_S, max_connections=64, by_address=limit)
    async with serving(hello, bounds) as served:
        silent = [await served.connect() for _ in range(16)]
        for _ in range(100):
            reader, writer = await served.connect()
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert answer.startswith(b"HTTP/1.1 503 ")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "too_many_connections"
            writer.close()
        reader, writer = await served.connect("127.0.0.2")
        writer.write(GET)
        assert await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
        writer.close()
        # Whoever leaves makes room.
        silent.pop()[1].close()
        await until(lambda: limit.open("127.0.0.1") == 15)
        assert b"hello" in await served.ask(b"GET / HTTP/1.0\r\n\r\n")
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("app", [refuse, hello])
async def test_an_answer_before_the_bodys_end_is_the_connections_last(app: ASGIApp) -> None:
    async with serving(app, Bounds(head_timeout_s=0.2)) as served:
        reader, writer = await served.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert b"connection: close" in answer
        # What still comes is dropped, and does not make the kernel take the answer away.
        for _ in range(30):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert b"408" not in answer
        writer.close()


async def test_the_answer_can_be_read_by_a_client_that_sends_its_whole_body_first() -> None:
    async with serving(refuse) as served:
        reader, writer = await served.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        writer.write(b"x" * 3_000_000)
        await asyncio.wait_for(writer.drain(), PATIENCE_S)
        await asyncio.sleep(0.1)
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).endswith(b"who? ")
        writer.close()


async def test_a_connection_whose_body_was_read_to_its_end_is_kept() -> None:
    async with serving(refuse) as served:
        reader, writer = await served.connect()
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
            head = await asyncio.wait_for(reader.readuntil(b"who? "), PATIENCE_S)
            assert b"connection: close" not in head
        writer.close()


async def test_a_connection_that_lingers_is_closed_in_the_end() -> None:
    async with serving(refuse) as served:
        reader, writer = await served.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        await asyncio.wait_for(reader.read(), PATIENCE_S)
        await until(lambda: not served.connections)
        writer.close()


async def test_what_follows_a_request_is_not_answered_before_it() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.1)
        await hello(scope, receive, send)

    async with serving(slow) as served:
        answers = await served.ask(GET + b"this is no HTTP\r\n\r\n")
        assert answers.count(b"HTTP/1.1 ") == 1
        assert answers.endswith(b"hello")


async def test_a_request_learns_that_its_client_is_gone_though_others_wait_behind_it() -> None:
    gone = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with serving(waits) as served:
        _, writer = await served.connect()
        writer.write(GET * 3)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_another_protocol_is_not_spoken(protocol: bytes) -> None:
    async with serving(hello) as served:
        answer = await served.ask(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"hello")
