"""The whole admin API behind the ingress middleware: none of its routes answers without a token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive

from loomserve.deployments.gateway.admin import build_admin_api
from loomserve.deployments.kvstore.admin import build_kv_router
from loomserve.platform.access.admin import build_keys_router
from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Conflict, Unavailable
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.admin import build_batch_router
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.usage.admin import build_usage_router
from loomserve.platform.usage.files import UsageFiles
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics

TOKEN = {"Authorization": "Bearer token"}
KEY = {"Authorization": "Bearer lsk-alice"}
DOCS = {"/docs", "/openapi.json"}
SERVERS: dict[str, dict[str, Any]] = {
    "open to the network": {"host": "0.0.0.0", "allow_unauthenticated": True},
    "on loopback": {},
    "with keys": {"api_keys": [{"name": "alice", "hash": hash_key("lsk-alice")}]},
}


async def _away(*_: Any) -> Any:
    raise Unavailable("this is as far as the token leads")


async def _pin(path: str, body: Any, tenant: str | None, receive: Receive) -> tuple[int, bytes]:
    raise AssertionError("nothing is pinned here")


async def _refuse(*_: Any) -> Reply[Any]:
    return Reply(error=Conflict("the controller refuses this"))


class Controller:
    """Takes the place of the controller's handle."""

    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self._remote = remote

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": staticmethod(self._remote)})


def built(remote: Callable[..., Awaitable[Any]]) -> FastAPI:
    controller: Any = Controller(remote)
    usage = UsageMeter(UsageMetrics(CollectorRegistry()), UsageFiles(Path("/nowhere")))
    return build_admin_api(
        controller,
        build_kv_router(None, tuple, _pin),
        build_batch_router(_away),
        build_usage_router(usage),
        build_keys_router(LiveKeys(Server()), asked_for=False),
    )


@pytest.fixture(scope="module", name="api")
def admin_api() -> FastAPI:
    return built(_away)


def statuses(api: FastAPI, server: dict[str, Any], headers: dict[str, str]) -> dict[str, int]:
    """The status of each method and path."""
    checked = Server.model_validate({**server, "admin_token_hash": hash_key("token")})
    app = Starlette(routes=[Mount("/admin/v1", api)], exception_handlers=exception_handlers)
    asgi = ingress_middleware(app, checked, rejected=lambda _: None)
    requests = [
        (method.upper(), path)
        for path, methods in api.openapi()["paths"].items()
        for method in methods
    ]
    requests += [(method, path) for path in (*DOCS, "/redoc") for method in ("GET", "HEAD")]

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {
                f"{method} {path}": (
                    await client.request(
                        method, "/admin/v1" + re.sub(r"\{[^}]*\}", "x", path), headers=headers
                    )
                ).status_code
                for method, path in requests
            }

    return asyncio.run(ask())


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("headers", [{}, KEY, {"Authorization": "Bearer "}], ids=str)
def test_no_route_answers_without_the_token(
    api: FastAPI, server: dict[str, Any], headers: dict[str, str]
) -> None:
    found = statuses(api, server, headers)
    assert len(found) > 25
    entered = {route for route, status in found.items() if status != 401}
    at_home = {f"{method} {path}" for path in DOCS for method in ("GET", "HEAD")}
    assert entered == (set() if "host" in server else at_home)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_with_the_token_each_route_answers(api: FastAPI, server: dict[str, Any]) -> None:
    assert not {401, 403} & set(statuses(api, server, TOKEN).values())


def test_what_the_controller_refuses_is_answered_as_it_says() -> None:
    found = statuses(built(_refuse), {}, TOKEN)
    assert list(found.values()).count(409) > 13
    assert 500 not in found.values()


def test_the_description_says_how_to_give_the_token(api: FastAPI) -> None:
    described = api.openapi()
    (name, scheme), *others = described["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"], others) == ("http", "bearer", [])
    operations = [each for path in described["paths"].values() for each in path.values()]
    assert all(operation["security"] == [{name: []}] for operation in operations)


@pytest.mark.parametrize(
    ("option", "status"),
    [
        ("max_model_len", 503),
        *[(option, 400) for option in ("trust_remote_code", "worker_cls", "middleware")],
    ],
)
def test_a_model_with_options_that_name_code_comes_no_further(
    api: FastAPI, option: str, status: int
) -> None:
    checked = Server.model_validate({"admin_token_hash": hash_key("token")})
    app = Starlette(routes=[Mount("/admin/v1", api)], exception_handlers=exception_handlers)
    asgi = ingress_middleware(app, checked, rejected=lambda _: None)
    model = {"name": "m", "source": "demo", "devices": ["core0"], "engine": {option: 64}}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/admin/v1/models", json=model, headers=TOKEN)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == f"engine.{option}"


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ('"a"', 503, None, ""),
        ('{"a": 95, "b": 5}', 503, None, ""),
        ('{"models": {"a": 95, "b": 5}, "sticky": "key"}', 503, None, ""),
        ('{"a": 95, "b": "5"}', 400, "b", "b: a weight must be a whole number"),
        ('{"models": {"a": -1}}', 400, "models.a", "models.a: a weight must be from 0"),
        ('{"a": 0}', 400, None, "no model has a weight above 0"),
        ('{"models": {"a": 1}, "sticky": "me"}', 400, "sticky", "sticky: "),
        ("[]", 400, None, ""),
        ("{", 400, None, ""),
        ("", 400, None, ""),
    ],
)
def test_an_alias_is_written_as_in_the_configuration(
    api: FastAPI, body: str, status: int, param: str | None, says: str
) -> None:
    app = Starlette(routes=[Mount("/admin/v1", api)], exception_handlers=exception_handlers)
    checked = Server.model_validate({"admin_token_hash": hash_key("token")})
    asgi = ingress_middleware(app, checked, rejected=lambda _: None)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {**TOKEN, "Content-Type": "application/json"}
            return await client.put("/admin/v1/aliases/org/chat", content=body, headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith(says)
    if says:
        assert error["param"] == param
