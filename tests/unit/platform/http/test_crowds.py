"""Crowds of clients that say nothing, or only half of it, beside streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from loomserve.platform.base import descriptors
from loomserve.platform.http import server
from loomserve.platform.http.protocol import Bounds
from tests.unit.platform.http.raw import RawServer, Streams, serving

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le"
PIECES = 40

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """``/stream`` takes four seconds."""

    async def pieces() -> AsyncIterator[str]:
        for number in range(PIECES):
            yield f"<{number}>"
            await asyncio.sleep(0.1)

    async def hello() -> AsyncIterator[str]:
        yield "hello"

    body = pieces() if scope["path"] == "/stream" else hello()
    await StreamingResponse(body)(scope, receive, send)


async def ask(served: RawServer) -> int:
    """The status of a new client's request; it waits for its answer, and hangs up."""
    reader, writer = await served.connect()
    writer.write(GET)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    writer.close()
    return int(head.split()[1])


async def is_closed(streams: Streams) -> bool:
    await asyncio.wait_for(streams[0].read(), 60)
    return True


async def test_connections_without_a_request_give_way_the_oldest_first() -> None:
    async with serving(answers, Bounds(head_timeout_s=60, max_connections=4)) as served:
        stream = await served.connect()
        stream[1].write(STREAM)
        await stream[0].readuntil(b"<0>")
        silent = [await served.connect() for _ in range(3)]
        silent[0][1].write(HALF)
        for _ in range(20):
            if served.connections and len(served.connections) == 4:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        assert await ask(served) == 200
        answer = await asyncio.wait_for(silent[0][0].read(), 60)
        assert answer.startswith(b"HTTP/1.1 503 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "too_many_connections"
        # There is room for one again.
        last = await served.connect()
        assert await ask(served) == 200
        assert await is_closed(silent[1])
        silent[2][1].write(GET)
        await asyncio.wait_for(silent[2][0].readuntil(b"hello"), 60)
        await stream[0].readuntil(f"<{PIECES - 1}>".encode())
        for _, writer in (*silent, stream, last):
            writer.close()


async def test_a_connection_kept_after_an_answer_gives_way_after_the_others_and_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_KEPT_S", 0.5)
    async with serving(answers, Bounds(head_timeout_s=60, max_connections=2)) as served:
        kept, silent = await served.connect(), await served.connect()
        kept[1].write(GET)
        await kept[0].readuntil(b"hello")
        await asyncio.sleep(0.6)
        assert await ask(served) == 200
        assert await is_closed(silent)
        kept[1].write(GET)
        await kept[0].readuntil(b"hello")
        other = await served.connect()
        other[1].write(GET)
        await other[0].readuntil(b"hello")
        assert await ask(served) == 503
        await asyncio.sleep(0.6)
        assert await ask(served) == 200
        assert await is_closed(kept)
        for _, writer in (kept, silent, other):
            writer.close()


async def test_running_answers_do_not_give_way() -> None:
    async with serving(answers, Bounds(head_timeout_s=60, max_connections=2)) as served:
        streams = [await served.connect() for _ in range(2)]
        for reader, writer in streams:
            writer.write(STREAM)
            await reader.readuntil(b"<0>")
        assert [await ask(served) for _ in range(3)] == [503] * 3
        for reader, writer in streams:
            await reader.readuntil(f"<{PIECES - 1}>".encode())
            writer.close()


CHILD = """
import asyncio, resource, sys, uvloop
from loomserve.platform.base.descriptors import connections_that_fit, raise_limit
from loomserve.platform.http.protocol import Bounds
from loomserve.platform.http.server import HttpServer, listen
from tests.unit.platform.http.test_crowds import answers

async def main():
    raise_limit()
    # As much as a gateway has open at rest.
    held = [open("/dev/null") for _ in range(86)]
    sock = listen("127.0.0.1", 0)
    bounds = Bounds(head_timeout_s=10, max_connections=int(sys.argv[1]), send_timeout_s=30)
    await HttpServer(answers, sock, bounds=bounds).start()
    print(sock.getsockname()[1], flush=True)
    while True:
        # What else a process opens must still be had.
        for each in [open("/dev/null") for _ in range(32)]:
            each.close()
        await asyncio.sleep(0.02)

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), int(sys.argv[4])))
loop = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[sys.argv[2]]
with asyncio.Runner(loop_factory=loop) as runner:
    runner.run(main())
"""


@contextmanager
def child(most: int, loop: str, limits: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """A server under limits of descriptors; its port and process id."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(most), loop, *map(str, limits)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
            assert process.poll() is None
        except ConnectionError as error:
            raise AssertionError(f"the server has ended: {process.poll()}") from error
        finally:
            process.kill()


# Gateways run on uvloop.
@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])
@pytest.mark.parametrize(
    ("limits", "crowd", "most"),
    [
        # It says that it has room for more than there are descriptors.
        ((256, 256), 300, 1024),
        ((1024, 1024), 2000, 1024),
        ((1024, 4096), 2000, 1024),
    ],
)
async def test_a_crowd_beyond_all_descriptors_costs_no_stream(
    loop: str, limits: tuple[int, int], crowd: int, most: int
) -> None:
    descriptors.raise_limit()
    if descriptors.limit() < crowd + 200:
        pytest.skip("this process may not open so many connections")
    with child(most, loop, limits) as (port, _):

        async def connect() -> Streams:
            return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 60)

        async def stream() -> bytes:
            reader, writer = await connect()
            writer.write(STREAM)
            text = b""
            while f"<{PIECES - 1}>".encode() not in text:
                piece = await asyncio.wait_for(reader.read(2**16), 60)
                assert piece, text[-200:]
                text += piece
            writer.close()
            return text

        streams = [asyncio.create_task(stream()) for _ in range(12)]
        await asyncio.sleep(0.5)
        silent: list[Streams] = []
        statuses: list[int] = []
        for number in range(crowd):
            streams_of_one = await connect()
            if number % 2:
                streams_of_one[1].write(HALF)
            silent.append(streams_of_one)
            if number % 100 == 99:
                reader, writer = await connect()
                writer.write(GET)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
                statuses.append(int(head.split()[1]))
                writer.close()
        assert statuses == [200] * (crowd // 100)
        for text in await asyncio.gather(*streams):
            assert text.count(b"<") == PIECES
        for _, writer in silent:
            writer.close()
