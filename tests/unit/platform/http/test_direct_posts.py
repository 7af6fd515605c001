"""Requests that pass no framework are answered as if they did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.base.errors import BadRequest, RequestError, TooManyRequests
from loomserve.platform.config import Server
from loomserve.platform.http.asgi import DirectPosts
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware

PATH = "/v1/completions"


class Endpoint:
    """What is posted comes back, or is refused."""

    def __init__(self, refuse: Callable[[], Exception] | None, after: bool) -> None:
        self._refuse, self._after = refuse, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._refuse is None:
            await PlainTextResponse(scope["state"]["body"])(scope, receive, send)
            return
        if self._after:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        raise self._refuse()


def routed(endpoint: Any) -> ASGIApp:
    route = Route(PATH, endpoint, methods=["POST"])
    return Starlette(routes=[route], exception_handlers=exception_handlers)


def asked(app: ASGIApp, method: str, path: str) -> tuple[int, bytes, dict[str, str], list[str]]:
    rejected: list[str] = []
    door = ingress_middleware(app, Server(), rejected=rejected.append)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=door, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            content = b"{}" if method == "POST" else None
            return await client.request(
                method, path, content=content, headers={"x-request-id": "one"}
            )

    answer = asyncio.run(ask())
    return answer.status_code, answer.content, dict(answer.headers), rejected


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "refuse",
    [
        None,
        lambda: BadRequest("no", param="n"),
        lambda: TooManyRequests("later", retry_after_s=3),
        lambda: ZeroDivisionError("a mistake of ours"),
    ],
)
def test_answers_and_errors_are_those_of_the_framework(
    refuse: Callable[[], Exception] | None, after: bool
) -> None:
    endpoint: Any = Endpoint(refuse, after)
    direct = asked(DirectPosts({PATH: endpoint}, routed(endpoint)), "POST", PATH)
    assert direct == asked(routed(endpoint), "POST", PATH)
    status, body, headers, rejected = direct
    assert headers["x-request-id"] == "one"
    if refuse is None:
        assert (status, body, rejected) == (200, b"{}", [])
    elif not after:
        error = refuse()
        expected = error.status if isinstance(error, RequestError) else 500
        assert status == expected
        assert json.loads(body)["error"]["code"] == rejected[0]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", PATH, 405), ("POST", "/v1/nothing", 404)]
)
def test_all_else_is_the_others(method: str, path: str, status: int) -> None:
    endpoint: Any = Endpoint(None, False)
    app = DirectPosts({PATH: endpoint}, routed(endpoint))
    assert asked(app, method, path)[0] == status
