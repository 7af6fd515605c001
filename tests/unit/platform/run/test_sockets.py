"""The platform's processes reach each other by sockets in the run's folder, and nobody else."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loomserve.platform.run.folder import own_run
from loomserve.platform.run.sockets import PlatformConnector, listen_locally, node_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def started(name: str) -> tuple[web.AppRunner, str]:
    async def say_which(request: web.Request) -> web.Response:
        return web.Response(text=f"{name} {request.path_qs}")

    app = web.Application()
    app.router.add_get("/{rest:.*}", say_which)
    runner = web.AppRunner(app)
    await runner.setup()
    sock, address = listen_locally("engine", "127.0.0.1")
    await web.SockSite(runner, sock).start()
    return runner, address


async def test_one_session_reaches_each_by_its_address_over_kept_connections() -> None:
    one, first = await started("one")
    two, second = await started("two")
    reused: list[str] = []
    trace = aiohttp.TraceConfig()

    async def note(*_: object) -> None:
        reused.append("again")

    trace.on_connection_reuseconn.append(note)
    async with aiohttp.ClientSession(
        connector=PlatformConnector(), trace_configs=[trace]
    ) as session:
        for address, name in ((first, "one"), (second, "two"), (first, "one")):
            async with session.get(f"http://{address}/v1/files?limit=2") as response:
                assert await response.text() == f"{name} /v1/files?limit=2"
    assert reused == ["again"]
    await one.cleanup()
    await two.cleanup()


async def test_who_has_ended_refuses_as_a_closed_port_does() -> None:
    ended, address = await started("ended")
    await ended.cleanup()
    async with aiohttp.ClientSession(connector=PlatformConnector()) as session:
        for gone in (address, "nobody-0.127.0.0.1"):
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://{gone}/")


async def test_a_replica_that_names_a_port_gets_nothing_sent() -> None:
    app = web.Application()
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    app.router.add_get("/", note)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(connector=PlatformConnector()) as session,
    ):
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://{server.host}:{server.port}/")
    assert asked == []


def test_an_address_is_a_socket_of_the_run_and_its_node() -> None:
    sock, address = listen_locally("lane", "10.0.0.7")
    with sock:
        assert sock.family == socket.AF_UNIX
        assert node_of(address) == "10.0.0.7"
        assert own_run().sockets / address.partition(".")[0] in own_run().sockets.iterdir()
        assert listen_locally("lane", "10.0.0.7")[1] != address
