"""Sockets of one node as processes of another reach them, and whoever has not got the token not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from loomserve.platform.run import node_gate
from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.run.node_gate import NodeGate
from loomserve.platform.run.node_identity import client_context, server_context
from loomserve.platform.run.sockets import PlatformConnector, listen_locally, node_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

TOKEN = "of-this-platform"
BODY = bytes(range(256)) * 4096


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def gate_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[bytes]
) -> AsyncIterator[NodeGate]:
    """A gate to a server that answers what it is sent; its caller is as on another node."""

    async def echo(request: web.Request) -> web.Response:
        asked.append(await request.read())
        return web.Response(body=asked[-1])

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    sock, address = listen_locally("replica", "127.0.0.1")
    await web.SockSite(runner, sock).start()
    # It opens nothing on loopback, where there are no other nodes.
    monkeypatch.setattr(node_gate, "is_loopback", lambda _: False)
    gate = await NodeGate.open(address, TOKEN)
    (tmp_path / "sockets").mkdir()
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    try:
        yield gate
    finally:
        await gate.close()
        await runner.cleanup()


async def test_who_has_the_token_is_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    async with (
        gate_from_elsewhere(tmp_path, monkeypatch, asked) as gate,
        aiohttp.ClientSession(connector=PlatformConnector(TOKEN)) as session,
    ):
        assert node_of(gate.address) == "127.0.0.1"
        for body in (b"x", BODY, b"y"):
            async with session.post(f"http://{gate.address}/", data=body) as response:
                assert await response.read() == body
    assert asked == [b"x", BODY, b"y"]


@pytest.mark.parametrize("token", ["of-another-platform", None])
async def test_who_has_another_or_none_connects_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    asked: list[bytes] = []
    async with (
        gate_from_elsewhere(tmp_path, monkeypatch, asked) as gate,
        aiohttp.ClientSession(connector=PlatformConnector(token)) as session,
    ):
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"http://{gate.address}/", data=b"x")
    assert asked == []


async def test_who_shows_no_certificate_or_speaks_no_tls_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    async with gate_from_elsewhere(tmp_path, monkeypatch, asked) as gate:
        port = int(gate.address.rpartition(":")[2])
        for context in (anonymous, None):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
            writer.close()
    assert asked == []


async def test_a_server_without_the_token_is_sent_nothing() -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(
        listen, "127.0.0.1", 0, ssl=server_context("of-another-platform")
    )
    port = server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(connector=PlatformConnector(TOKEN)) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"http://replica-0.127.0.0.1:{port}/", data=b"x")
    server.close()
    assert heard == []


async def test_a_gate_that_is_closed_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        gate_from_elsewhere(tmp_path, monkeypatch, []) as gate,
        aiohttp.ClientSession(connector=PlatformConnector(TOKEN)) as session,
    ):
        async with session.post(f"http://{gate.address}/", data=b"x") as response:
            assert response.status == 200
        await gate.close()
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"http://{gate.address}/", data=b"x")


async def test_on_loopback_there_is_no_port() -> None:
    sock, address = listen_locally("replica", "127.0.0.1")
    with sock:
        gate = await NodeGate.open(address, TOKEN)
        assert gate.address == address
        await gate.close()


def test_all_processes_of_a_platform_make_the_same_certificate() -> None:
    def certificate(context: ssl.SSLContext) -> bytes:
        (der,) = context.get_ca_certs(binary_form=True)
        return der

    made = certificate(client_context(TOKEN))
    client_context.cache_clear()
    assert certificate(client_context(TOKEN)) == certificate(server_context(TOKEN)) == made
    assert certificate(client_context("another")) != made
