"""The socket that a server listens on."""

from __future__ import annotations

import socket

import pytest

from tests.unit.platform.http.raw import serving
from tests.unit.platform.http.test_slow_clients import hello, until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


async def test_small_writes_are_sent_at_once() -> None:
    async with serving(hello) as server:
        _, writer = await server.connect()
        await until(lambda: bool(server.connections))
        (connection,) = server.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
