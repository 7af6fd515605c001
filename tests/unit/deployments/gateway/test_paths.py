"""Which endpoint answers which way to write a path: the gateway's own routes over a real server."""

from __future__ import annotations

import asyncio
import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from loomserve.deployments.gateway.admin import build_admin_api
from loomserve.deployments.gateway.composition import _app
from loomserve.deployments.kvstore.admin import build_kv_router
from loomserve.platform.access.admin import build_keys_router
from loomserve.platform.access.keys import hash_key
from loomserve.platform.batch.admin import build_batch_router
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import ingress_middleware
from loomserve.platform.requests.engine_request import FORWARDED
from loomserve.platform.tracing.admin import build_tracing_router
from loomserve.platform.usage.admin import build_usage_router
from tests.unit.platform.http.raw import serving

ADMIN = "sk-loom-" + "a" * 32
ENDPOINTS = (*FORWARDED, "/v1/models", "/v1/files", "/v1/batches")


def named(name: str) -> Any:
    """An endpoint that tells its name, and which part of the path it was given."""

    async def tell(request: Request) -> Response:
        return JSONResponse({"is": name, **request.path_params})

    return tell


class Tells:
    """The same as an ASGI application that reads the path itself."""

    def __init__(self, name: str = "") -> None:
        """``name``: none, it tells the path."""
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope["raw_path"].decode()
        await JSONResponse({"is": self._name or scope["path"], "raw": raw})(scope, receive, send)


@functools.cache
def gateway_app() -> Any:
    """The application of a gateway whose parts tell their names."""
    names = ("list_models", "retrieve_model", "ready", "takes_clients")
    routes: Any = SimpleNamespace(**{name: named(name) for name in names})
    clients: Any = Tells()
    batches: Any = Tells("batches")
    page: Any = SimpleNamespace(show=named("metrics"))
    nothing: Any = None
    keys: Any = SimpleNamespace(all=())
    admin = build_admin_api(
        nothing,
        build_kv_router(None, lambda: (), nothing),
        build_batch_router(nothing),
        build_usage_router(nothing),
        build_keys_router(keys, asked_for=False),
        build_tracing_router(None),
    )
    server = Server.model_validate({"admin_token_hash": hash_key(ADMIN)})
    return ingress_middleware(
        _app(clients, batches, routes, page, admin, console=server.console),
        server,
        rejected=lambda _: None,
        endpoints=ENDPOINTS,
    )


def ask(*targets: str, method: str = "GET", host: str = "localhost") -> list[tuple[int, str, Any]]:
    """Each answer's status, head and JSON."""
    raw = [
        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Authorization: Bearer {ADMIN}\r\nX-Forwarded-Proto: https\r\n"
        f"{'Content-Length: 2' if method == 'POST' else 'x: y'}\r\n\r\n"
        f"{'{}' if method == 'POST' else ''}"
        for target in targets
    ]

    async def asked() -> list[bytes]:
        async with serving(gateway_app()) as server:
            return [await server.ask(each.encode()) for each in raw]

    answers = []
    for answer in asyncio.run(asked()):
        head, _, body = answer.partition(b"\r\n\r\n")
        told = json.loads(body) if body.startswith(b"{") else None
        answers.append((int(answer.split()[1]), head.decode().lower(), told))
    return answers


@pytest.mark.parametrize("path", FORWARDED)
def test_slashes_too_many_change_nothing_for_an_endpoint(path: str) -> None:
    doubled = f"//{path.replace('/', '//')}//"
    encoded = path.replace("/v1/", "/v1%2f")
    forms = (path, f"{path}/", f"{path}//", f"/{path}", doubled, encoded, f"{path}?a=/b//")
    for status, _, told in ask(*forms, method="POST"):
        assert (status, told["is"]) == (200, path)


@pytest.mark.parametrize(
    ("forms", "told"),
    [
        (("/v1/models", "/v1//models", "//v1/models", "/v1/models/"), {"is": "list_models"}),
        (("/v1/models/a/b", "/v1/models//a%2Fb/"), {"is": "retrieve_model", "model": "a/b"}),
        (("/ready", "//ready/", "/ready/"), {"is": "ready"}),
        (("/metrics/", "//metrics"), {"is": "metrics"}),
        # The lane gets the path that was checked.
        (("/v1/files/f/content", "/v1//files/f//content/"),
         {"is": "batches", "raw": "/v1/files/f/content"}),
        (("/v1/files/", "/v1/files"), {"is": "batches", "raw": "/v1/files"}),
        (("/v1//files/a%20b%3F",), {"is": "batches", "raw": "/v1/files/a%20b%3F"}),
    ],
)  # fmt: skip
def test_slashes_too_many_change_nothing(forms: tuple[str, ...], told: dict[str, str]) -> None:
    assert [(status, said) for status, _, said in ask(*forms)] == [(200, told)] * len(forms)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_nothing_redirects_to_another_scheme_or_host(method: str) -> None:
    targets = [
        *(f"{start}{path}{end}" for path in (*ENDPOINTS, "/admin/v1", "/admin/v1/docs", "/console",
          "/console/x", "/health", "/nothing", "/", "/admin")
          for start in ("", "/", "//evil.example") for end in ("", "/", "//")),
        "http://localhost/console", "http://localhost/v1/models/",
    ]  # fmt: skip
    for target, (status, head, _) in zip(targets, ask(*targets, method=method), strict=True):
        location = next((x for x in head.split("\r\n") if x.startswith("location:")), None)
        assert location in (None, "location: console/"), target
        assert (status in (307, 308, 301, 302)) == (location is not None)


def test_the_console_stays_where_its_files_are() -> None:
    (start, _, _), (page, head, _) = ask("/console", "/console/")
    assert (start, page) == (308, 200)
    assert "content-type: text/html" in head


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/chat/completions/", {"POST"}),
        ("PUT", "/v1//embeddings", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/a", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("GET", "/admin/v1/replicas/a/role", {"PUT"}),
    ],
)
def test_a_wrong_method_is_405_and_names_the_right_ones(
    method: str, path: str, allow: set[str]
) -> None:
    ((status, head, told),) = ask(path, method=method)
    assert status == 405
    (line,) = (each for each in head.split("\r\n") if each.startswith("allow: "))
    assert set(line.removeprefix("allow: ").upper().split(", ")) == allow
    assert told is None if method == "HEAD" else told["error"]["code"] == "method_not_allowed"


def test_head_is_answered_as_get_is_without_a_body() -> None:
    (get, get_head, _), (head, head_head, told) = ask("/v1/models")[0], ask(
        "/v1/models", method="HEAD"
    )[0]  # fmt: skip
    assert (get, head, told) == (200, 200, None)
    length = [each for each in get_head.split("\r\n") if each.startswith("content-length")]
    assert length == [x for x in head_head.split("\r\n") if x.startswith("content-length")]
