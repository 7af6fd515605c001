"""A port for operators beside that of clients, by real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.shared_counts import Counts
from loomserve.platform.config import Server
from loomserve.platform.http.console.files import console_routes
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.ingress.listeners import Listeners
from loomserve.platform.http.server import listen

PROBES = ("/health", "/ready", "/-/healthz")
OPERATORS = ("/admin/v1/state", "/admin/v1/docs", "/metrics", "/console", "/console/", "/docs", "/")
SERVER: dict[str, Any] = {
    "admin_token_hash": hash_key("admin"),
    "metrics_token_hash": hash_key("metrics"),
    "api_keys": [{"name": "alice", "hash": hash_key("lsk-alice")}],
}
TOKENS = ("admin", "metrics", "lsk-alice", None)


async def _say(request: Request) -> Response:
    return PlainTextResponse("here")


def _app(server: Server, rejected: list[str], audited: list[str]) -> Any:
    paths = ("/v1/models", "/metrics", *PROBES)
    routes = [
        *(Route(path, _say) for path in paths),
        Mount("/admin/v1", routes=[Route("/state", _say, methods=["GET", "POST"])]),
        *console_routes(),
    ]
    app = Starlette(routes=routes, exception_handlers=exception_handlers)
    return ingress_middleware(app, server, rejected=rejected.append, audit=audited.append)


@dataclass(frozen=True)
class Opened:
    listeners: Listeners
    ports: tuple[int, ...]
    session: aiohttp.ClientSession
    rejected: list[str]
    audited: list[str]

    async def status(
        self, port: int, path: str, token: str | None = None, method: str = "GET"
    ) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"http://127.0.0.1:{port}{path}"
        options = {"headers": headers, "allow_redirects": False}
        async with self.session.request(method, url, **options) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def opened(ports: int = 2, **server: Any) -> AsyncIterator[Opened]:
    # Held, so that nobody else takes them before the listeners are open.
    held = [listen("127.0.0.1", 0, shared=True) for _ in range(ports)]
    numbers = tuple(int(sock.getsockname()[1]) for sock in held)
    chosen = dict(zip(("port", "admin_port"), numbers, strict=False))
    checked = Server.model_validate({**SERVER, **server, **chosen})
    rejected, audited = list[str](), list[str]()
    listeners = Listeners(_app(checked, rejected, audited), checked, Counts())
    await listeners.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Opened(listeners, checked.ports, session, rejected, audited)
    finally:
        await listeners.stop()
        for sock in held:
            sock.close()


def test_clients_find_no_page_of_operators_whatever_token_they_have() -> None:
    async def check() -> None:
        async with opened() as at:
            public, _ = at.ports
            for path in OPERATORS:
                found = {await at.status(public, path, token) for token in TOKENS}
                assert found == {404}, path
            assert set(at.rejected) == {"not_found"}
            assert await at.status(public, "/admin/v1/state", "admin", "POST") == 404
            (line,) = at.audited
            assert '"status": 404' in line

    asyncio.run(check())


def test_operators_find_all_at_theirs_and_show_their_tokens() -> None:
    async def check() -> None:
        async with opened() as at:
            _, admin = at.ports
            asked = {
                "/admin/v1/state": {"admin": 200, "metrics": 401, "lsk-alice": 401, None: 401},
                "/metrics": {"admin": 200, "metrics": 200, "lsk-alice": 401, None: 401},
                "/v1/models": {"admin": 401, "metrics": 401, "lsk-alice": 200, None: 401},
                "/console/": dict.fromkeys(TOKENS, 200),
                "/console": dict.fromkeys(TOKENS, 308),
                "/ready": dict.fromkeys(TOKENS, 200),
            }
            for path, expected in asked.items():
                found = {token: await at.status(admin, path, token) for token in TOKENS}
                assert found == expected, path

    asyncio.run(check())


def test_clients_and_probes_are_answered_at_both() -> None:
    async def check() -> None:
        async with opened() as at:
            for port in at.ports:
                assert await at.status(port, "/v1/models", "lsk-alice") == 200
                assert await at.status(port, "/v1/models") == 401
                assert {await at.status(port, path) for path in PROBES} == {200}

    asyncio.run(check())


def test_without_a_port_of_their_own_operators_ask_where_clients_do() -> None:
    async def check() -> None:
        async with opened(ports=1) as at:
            (port,) = at.ports
            assert await at.status(port, "/admin/v1/state", "admin") == 200
            assert await at.status(port, "/metrics", "metrics") == 200
            assert await at.status(port, "/console/") == 200
            assert await at.status(port, "/v1/models", "lsk-alice") == 200

    asyncio.run(check())


def test_a_crowd_of_clients_keeps_no_operator_out() -> None:
    async def check() -> None:
        async with opened(max_connections=3) as at:
            public, admin = at.ports
            crowd = [await asyncio.open_connection("127.0.0.1", public) for _ in range(3)]
            for reader, writer in crowd:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await reader.readuntil(b"here")
            assert await at.status(public, "/health") == 503
            assert await at.status(admin, "/admin/v1/state", "admin") == 200
            for _, writer in crowd:
                writer.close()

    asyncio.run(check())


def test_a_port_that_is_taken_opens_neither() -> None:
    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            free = listen("127.0.0.1", 0)
            port = free.getsockname()[1]
            free.close()
            ports = {"port": port, "admin_port": taken.getsockname()[1]}
            server = Server.model_validate({**SERVER, **ports})
            where = f"127.0.0.1:{ports['admin_port']}: .* in use"
            with pytest.raises(OSError, match=where):
                Listeners(_app(server, [], []), server, Counts())
            listen("127.0.0.1", port).close()

    asyncio.run(check())


def test_one_that_drains_is_to_be_let_be() -> None:
    async def check() -> None:
        async with opened() as at:
            assert not at.listeners.drains
            await at.listeners.drain()
            assert at.listeners.drains
            with pytest.raises(aiohttp.ClientConnectorError):
                await at.session.get(f"http://127.0.0.1:{at.ports[0]}/")

    asyncio.run(check())


def test_both_close() -> None:
    async def check() -> None:
        async with opened() as at:
            assert at.listeners.alive
            await at.listeners.stop()
            assert not at.listeners.alive
            for port in at.ports:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await at.status(port, "/health")

    asyncio.run(check())
