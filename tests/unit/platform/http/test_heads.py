"""What a server takes for a request, byte by byte, and how large its head may be."""

from __future__ import annotations

import asyncio
import json
import time

import psutil
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.http.protocol import ONCE, Bounds
from tests.unit.platform.http.raw import serving
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MAX_HEAD = Bounds(head_timeout_s=1).max_head
MAX_FIELDS = Bounds(head_timeout_s=1).max_fields


AMBIGUOUS = (
    # Two lengths
    POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    POST + b"Content-Length: 3, 3\r\n\r\nabc",
    POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    # No length
    POST + b"Content-Length: +3\r\n\r\nabc",
    POST + b"Content-Length: -3\r\n\r\nabc",
    POST + b"Content-Length: 0x3\r\n\r\nabc",
    POST + b"Content-Length: 3 3\r\n\r\nabc",
    POST + b"Content-Length:\r\n\r\nabc",
    POST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
    # Transfer codings
    POST + b"Transfer-Encoding: gzip\r\n\r\nabc",
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: identity\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    # Ends of lines
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    GET + b"A: b\r\n c\r\n\r\n",
    # Fields
    GET + b"A: b\0c\r\n\r\n",
    GET + b"A: b\x01c\r\n\r\n",
    GET + b"A : b\r\n\r\n",
    GET + b": b\r\n\r\n",
    GET + b"A\xff: b\r\n\r\n",
    GET + b"Abc\r\n\r\n",
    b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    # The name of the server
    b"GET / HTTP/1.1\r\n\r\n",
    GET + b"Host: y\r\n\r\n",
    # Targets that are no path, or name another server
    b"GET http://y/a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://y HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x:81/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/ HTTP/1.1\r\nHost: x:81\r\n\r\n",
    b"GET http://x/ HTTP/1.1\r\nHost: x:443\r\n\r\n",
    b"GET http://x@y/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://y@x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x.y/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://y?x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET ftp://x/a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/a HTTP/1.0\r\n\r\n",
    b"GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET ?a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    # Headers that a check goes by, twice
    *(
        GET + b"%b: chunked\r\n%b: chunked\r\n\r\n" % (name, name.upper())
        for name in sorted(ONCE - {b"content-length"})
    ),
    GET + b"Authorization: Bearer a\r\nX: y\r\nauthorization: Bearer b\r\n\r\n",
    # The request's line
    b"GET /\r\nHost: x\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    # Chunks
    CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nabc",
    CHUNKED + b"-1\r\nabc",
    CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3\nabc\n0\n\n",
    CHUNKED + b"3;a\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3;a\0\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3\r\nabcX0\r\n\r\n",
    CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Tell what a request was read as."""
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = [name.decode() for name, _ in scope["headers"]]
    said = json.dumps([scope["method"], scope["path"], body.decode(), names]).encode() + b"\r\n"
    length = str(len(said)).encode()
    start = {"status": 200, "headers": [(b"content-length", length)]}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": said})


async def test_what_can_be_read_in_two_ways_is_answered_400_and_nothing_after_it() -> None:
    async with serving(echo) as server:
        answers = {raw: await server.statuses(raw) for raw in AMBIGUOUS}
    assert {raw: said for raw, said in answers.items() if said != [400]} == {}


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (GET + b"\r\n", ["GET", "/", "", ["host"]]),
        (b"\r\n\r\n" + GET + b"\r\n", ["GET", "/", "", ["host"]]),
        (GET + b"A:b  \r\n\r\n", ["GET", "/", "", ["host", "a"]]),
        (b"GET http://x/a HTTP/1.1\r\nHost: x\r\n\r\n", ["GET", "/a", "", ["host"]]),
        (b"GET HTTP://X:80/a HTTP/1.1\r\nHost: x\r\n\r\n", ["GET", "/a", "", ["host"]]),
        (b"GET http://x:81/a HTTP/1.1\r\nHost: X:81\r\n\r\n", ["GET", "/a", "", ["host"]]),
        (b"GET https://x/a HTTP/1.1\r\nHost: x:443\r\n\r\n", ["GET", "/a", "", ["host"]]),
        (b"GET http://[::1]/a HTTP/1.1\r\nHost: [::1]\r\n\r\n", ["GET", "/a", "", ["host"]]),
        (b"GET //y/a HTTP/1.1\r\nHost: x\r\n\r\n", ["GET", "//y/a", "", ["host"]]),
        (GET + b"X-A: b\r\nX-A: c\r\n\r\n", ["GET", "/", "", ["host", "x-a", "x-a"]]),
        (POST + b"Content-Length: 3\r\n\r\nabc", ["POST", "/", "abc", ["host", "content-length"]]),
        (GET + b"Content-Length: 3\r\n\r\nabc", ["GET", "/", "abc", ["host", "content-length"]]),
        (
            CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n",
            ["POST", "/", "abc", ["host", "transfer-encoding"]],
        ),
        (
            CHUNKED + b'3;a="b;c"\r\nabc\r\n00\r\n\r\n',
            ["POST", "/", "abc", ["host", "transfer-encoding"]],
        ),
        # Trailers are no headers.
        (
            CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: z\r\nX-Request-Id: y\r\n\r\n",
            ["POST", "/", "abc", ["host", "transfer-encoding"]],
        ),
    ],
)
async def test_what_can_be_read_in_one_way_is_and_so_is_the_next(
    raw: bytes, read: list[object]
) -> None:
    async with serving(echo) as server:
        answers = await server.ask(raw + GET + b"Connection: close\r\n\r\n")
        bodies = [part for part in answers.split(b"\r\n") if part.startswith(b"[")]
        assert json.loads(bodies[0]) == read
        assert len(bodies) == 2


async def test_a_request_within_another_protocol_is_answered_and_nothing_after_it() -> None:
    async with serving(echo) as server:
        upgrade = GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        assert await server.statuses(upgrade) == [200]


async def streams(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer in three pieces whose length nobody tells."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in (b"one ", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b" three", "more_body": False})


@pytest.mark.parametrize("host", [b"", b"Host: x\r\n"])
@pytest.mark.parametrize(
    ("app", "line", "body"),
    [
        (streams, b"GET / HTTP/1.0\r\n", b"one two three"),
        (streams, b"HEAD / HTTP/1.0\r\n", b""),
        (streams, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", b"one two three"),
        (echo, b"GET / HTTP/1.0\r\n", None),
    ],
)
async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_its_connection(
    app: ASGIApp, line: bytes, body: bytes | None, host: bytes
) -> None:
    async with serving(app) as server:
        head, _, told = (await server.ask(line + host + b"\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert told == body if body is not None else json.loads(told)[1] == "/"


async def test_who_asks_before_sending_a_body_is_told_to_go_on() -> None:
    async with serving(echo) as server:
        reader, writer = await server.connect()
        writer.write(POST + b"Content-Length: 3\r\nExpect: 100-Continue\r\n\r\n")
        line = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert line == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_S))[2] == "abc"
        writer.close()


async def test_a_chunk_may_say_that_it_is_large_but_is_not_believed() -> None:
    async with serving(echo) as server:
        _, writer = await server.connect()
        writer.write(CHUNKED + b"40000000\r\nabc")
        await asyncio.sleep(0.05)
        (connection,) = server.connections
        assert bytes(connection.cycle.body) in (b"", b"abc")
        writer.close()


def head_of(size: int) -> bytes:
    name = GET + b"A: "
    return name + b"b" * (size - len(name) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_head_may_have_so_many_bytes_and_not_one_more(at_once: bool) -> None:
    async with serving(echo) as server:
        for size, status in ((MAX_HEAD, b"200"), (MAX_HEAD + 1, b"431")) * 2:
            head = head_of(size)
            reader, writer = await server.connect()
            for place in range(0, size, size if at_once else 5000):
                writer.write(head[place : place + (size if at_once else 5000)])
                await asyncio.sleep(0)
            line = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            assert line.split()[1] == status
            if status == b"431":
                rest = await asyncio.wait_for(reader.read(), PATIENCE_S)
                assert b"connection: close" in rest
                error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
                assert (error["code"], error["type"]) == (
                    "head_too_large",
                    "invalid_request_error",
                )
            writer.close()


async def test_the_second_head_of_a_connection_is_bounded_as_the_first() -> None:
    async with serving(echo) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(head_of(MAX_HEAD))
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1] == b"200"
            await asyncio.wait_for(reader.readuntil(b"]\r\n"), PATIENCE_S)
        writer.write(head_of(MAX_HEAD + 1))
        assert b" 431 " in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (GET + b"A: b\r\n" * (MAX_FIELDS - 1) + b"\r\n", 200),
        (GET + b"A: b\r\n" * MAX_FIELDS + b"\r\n", 431),
        # A target of any length counts, and so do trailers and what is in chunks beside the body.
        (b"GET /" + b"a" * MAX_HEAD, 431),
        (CHUNKED + b"0\r\n" + b"A: b\r\n" * MAX_FIELDS + b"\r\n", 431),
        (CHUNKED + b"0\r\nA: " + b"b" * 2 * MAX_HEAD, 431),
        (CHUNKED + b"3;a=" + b"b" * 2 * MAX_HEAD, 431),
        (b"\r\n" * MAX_HEAD, 431),
    ],
)
async def test_fields_targets_and_trailers_are_bounded(raw: bytes, status: int) -> None:
    async with serving(echo) as server:
        assert (await server.statuses(raw))[0] == status


async def test_a_body_of_any_length_and_any_number_of_chunks_is_no_head() -> None:
    async with serving(echo) as server:
        size = 3 * MAX_HEAD
        long = POST + b"Content-Length: %d\r\n\r\n" % size + b"b" * size
        chunks = CHUNKED + b"1\r\nb\r\n" * MAX_HEAD + b"0\r\n\r\n"
        assert await server.statuses(long + chunks) == [200, 200, 200]


async def test_heads_without_end_cost_little_memory_and_time() -> None:
    piece = b"b" * 2**18

    async with serving(echo) as server:
        before = psutil.Process().memory_info().rss
        most = 0

        async def endless(begin: bytes) -> None:
            nonlocal most
            reader, writer = await server.connect()
            writer.write(begin)
            try:
                for _ in range(32):
                    writer.write(piece)
                    await writer.drain()
                    most = max(most, psutil.Process().memory_info().rss - before)
                assert b" 431 " in await asyncio.wait_for(reader.read(), PATIENCE_S)
            except ConnectionError:
                pass
            finally:
                writer.close()

        began = time.process_time()
        heads = [GET + b"A: ", b"GET /", CHUNKED + b"0\r\nA: ", CHUNKED + b"1;a="]
        await asyncio.gather(*(endless(heads[n % len(heads)]) for n in range(50)))
        assert most < 64 * 2**20
        assert time.process_time() - began < 10
