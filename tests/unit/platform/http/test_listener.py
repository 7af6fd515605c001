"""HTTPS over real sockets: handshakes within bounds, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loomserve.platform.http.protocol import AddressLimit, Bounds
from loomserve.platform.http.server import HttpServer, listen
from loomserve.platform.http.tls import LiveCertificate, trust_in
from tests.unit.certificates import Pair, make_pair
from tests.waiting import PATIENCE_S

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Run = Callable[[Coroutine[None, None, None]], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine in an event loop that the gateway may have."""

    def run_in_loop(check: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(check)

    return run_in_loop


async def scheme(request: Request) -> Response:
    return PlainTextResponse(f"by {request.url.scheme}")


@dataclass
class Serving:
    server: HttpServer
    port: int
    folder: Path

    async def connect(self, trusted: Pair) -> Streams:
        (self.folder / "trusted.pem").write_bytes(trusted.certificate)
        trust = trust_in(self.folder / "trusted.pem")
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=trust)

    async def connect_silently(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def serving(
    pair: Pair,
    folder: Path,
    *,
    timeout_s: float = 5.0,
    max_connections: int = 10,
    most_by_address: int = 10,
) -> AsyncIterator[Serving]:
    by_address = AddressLimit(most_by_address, spare_loopback=False)
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = HttpServer(
        Starlette(routes=[Route("/", scheme)]),
        sock,
        bounds=Bounds(timeout_s, max_connections, by_address),
        certificate=LiveCertificate(pair.write(folder)),
    )
    await server.start()
    try:
        yield Serving(server, port, folder)
    finally:
        await server.stop(1)


async def is_answered(streams: Streams) -> bool:
    reader, writer = streams
    writer.write(GET)
    await asyncio.wait_for(reader.readuntil(b"by https"), PATIENCE_S)
    return True


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), PATIENCE_S)


def test_an_application_is_served_by_https(run: Run, tmp_path: Path) -> None:
    pair = make_pair()

    async def check() -> None:
        async with serving(pair, tmp_path) as served:
            streams = await served.connect(pair)
            assert await is_answered(streams)
            assert await is_answered(streams)  # a kept connection
            assert served.server.alive
            streams[1].close()

    run(check())


def test_a_client_that_speaks_http_is_hung_up_on(run: Run, tmp_path: Path) -> None:
    pair = make_pair()

    async def check() -> None:
        async with serving(pair, tmp_path) as served:
            reader, writer = await served.connect_silently()
            writer.write(GET)
            assert b"HTTP" not in await until_closed(reader)
            writer.close()
            assert await is_answered(await served.connect(pair))

    run(check())


def test_a_handshake_that_does_not_end_is_cut(run: Run, tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(make_pair(), tmp_path, timeout_s=0.3) as served:
            began_s = time.monotonic()
            reader, writer = await served.connect_silently()
            writer.write(b"\x16\x03\x01")
            await until_closed(reader)
            assert time.monotonic() - began_s > 0.25
            writer.close()

    run(check())


def test_connections_that_shake_hands_count_and_the_oldest_gives_way(
    run: Run, tmp_path: Path
) -> None:
    pair = make_pair()

    async def check() -> None:
        async with serving(pair, tmp_path, max_connections=3) as served:
            first = await served.connect(pair)
            assert await is_answered(first)
            silent = [await served.connect_silently() for _ in range(2)]
            for _ in range(2):
                silent.append(await served.connect_silently())
                reader, writer = silent.pop(0)
                assert await until_closed(reader) == b""
                writer.close()
            assert await is_answered(first)
            second = await served.connect(pair)
            third = await served.connect(pair)
            for streams in (second, third, first):
                assert await is_answered(streams)
            # Each has just had an answer.
            reader, writer = await served.connect_silently()
            assert await until_closed(reader) == b""
            for _, writer in (*silent, first, second, third):
                writer.close()

    run(check())


def test_connections_of_one_client_that_shake_hands_count_too(run: Run, tmp_path: Path) -> None:
    pair = make_pair()

    async def check() -> None:
        async with serving(pair, tmp_path, most_by_address=2) as served:
            first = await served.connect(pair)
            assert await is_answered(first)
            silent = await served.connect_silently()
            reader, writer = await served.connect_silently()
            assert await until_closed(reader) == b""
            writer.close()
            other = await asyncio.open_connection(
                "127.0.0.1", served.port, local_addr=("127.0.0.2", 0)
            )
            await asyncio.sleep(0.05)
            assert not other[0].at_eof()
            other[1].close()
            # Who has shaken hands counts once.
            silent[1].close()
            await asyncio.sleep(0.05)
            second = await served.connect(pair)
            assert await is_answered(second)
            assert await is_answered(first)
            for _, each in (first, second):
                each.close()

    run(check())


def test_new_files_are_shown_to_new_connections_and_the_others_go_on(
    run: Run, tmp_path: Path
) -> None:
    old, new = make_pair(), make_pair()

    async def check() -> None:
        async with serving(old, tmp_path) as served:
            kept = await served.connect(old)
            assert await is_answered(kept)
            new.write(tmp_path)
            for _ in range(40):
                try:
                    fresh = await served.connect(new)
                    break
                except ssl.SSLCertVerificationError:
                    await asyncio.sleep(0.1)
            assert await is_answered(fresh)
            assert await is_answered(kept)

    run(check())


def test_a_stopped_server_listens_no_more_and_cuts_handshakes(run: Run, tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(make_pair(), tmp_path) as served:
            reader, writer = await served.connect_silently()
            await asyncio.sleep(0.05)
            await served.server.stop(1)
            assert await until_closed(reader) == b""
            writer.close()
            assert not served.server.alive
            with pytest.raises(ConnectionRefusedError):
                await served.connect_silently()

    run(check())
