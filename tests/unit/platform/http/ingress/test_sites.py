"""Whose names a server answers to, and whose pages may use it: as functions, then over HTTP."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import Forbidden
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.ingress.authentication import Sites

HOSTS = {
    "localhost": True,
    "localhost:8000": True,
    "LocalHost:8000": True,
    "127.0.0.1": True,
    "127.0.0.1:8000": True,
    "127.8.9.10:80": True,
    "[::1]": True,
    "[::1]:8000": True,
    "llm.example.org": True,
    "LLM.example.org:443": True,
    "evil.example": False,
    "evil.example:8000": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "0.0.0.0:8000": False,
    "[::]:8000": False,
    "10.0.0.1": False,
    "": False,
    "localhost:8000@evil.example": False,
    "[::1": False,
}
ORIGINS = {
    None: True,
    "http://localhost:3000": True,
    "https://127.0.0.1": True,
    "http://[::1]:8000": True,
    "https://app.example.org": True,
    "https://evil.example": False,
    "http://localhost.evil.example": False,
    "null": False,
    "": False,
    "file://localhost": False,
}
NAMED = {"allowed_hosts": ["llm.example.org"], "cors_origins": ["https://app.example.org"]}
PATHS = ["/v1/chat/completions", "/admin/v1/state", "/metrics", "/v1/files"]


def refused(server: Server, *, host: str | None = None, origin: str | None = None) -> bool:
    sites = Sites(server)
    try:
        sites.check_host(None if host is None else host.encode())
        sites.check_origin(None if origin is None else origin.encode())
    except Forbidden:
        return True
    return False


def test_without_a_host_header_no_browser_asks() -> None:
    assert not refused(Server())


def test_names_are_looked_at_where_any_are_configured_and_on_loopback() -> None:
    remote = Server(host="0.0.0.0", allow_unauthenticated=True)
    assert not refused(remote, host="whatever.example")
    assert refused(remote.model_copy(update=NAMED), host="whatever.example")
    assert not refused(remote.model_copy(update=NAMED), host="llm.example.org")
    assert not refused(remote.model_copy(update=NAMED), host="localhost:8000")
    assert refused(Server(), host="llm.example.org")


def test_any_origin_may_be_allowed() -> None:
    assert not refused(Server(cors_origins=("*",)), origin="https://evil.example")


@pytest.mark.parametrize("name", ["https://llm.example.org", "llm.example.org:8000", "", "*"])
def test_an_allowed_host_is_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        Server.model_validate({"allowed_hosts": [name]})


async def _echo(_: Request) -> PlainTextResponse:
    return PlainTextResponse("entered")


def test_pages_of_other_sites_enter_no_door_by_any_host_and_origin() -> None:
    app = Starlette(
        routes=[Route(path, _echo, methods=["POST"]) for path in PATHS],
        exception_handlers=exception_handlers,
    )
    server = Server.model_validate({**NAMED, "admin_token_hash": hash_key("admin")})
    asgi = ingress_middleware(app, server, rejected=lambda _: None)

    async def statuses() -> dict[tuple[str, str, str | None], int]:
        found = {}
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for path in PATHS:
                for host in HOSTS:
                    for origin in ORIGINS:
                        headers = {"Host": host}
                        if origin is not None:
                            headers["Origin"] = origin
                        answer = await client.post(path, headers=headers)
                        found[path, host, origin] = answer.status_code
                        if answer.status_code == 403:
                            assert json.loads(answer.content)["error"]["message"]
        return found

    found = asyncio.run(statuses())
    assert len(found) == 20 * 10 * 4

    def expected(path: str, host: str, origin: str | None) -> int:
        if not HOSTS[host]:
            return 403
        if path.startswith("/admin"):
            return 401
        return 200 if ORIGINS[origin] else 403

    wrong = {case: status for case, status in found.items() if status != expected(*case)}
    assert not wrong
