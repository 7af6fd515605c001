"""The port of an engine, which only the platform's own processes may use."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
from loomserve.platform.http.server import GuardedApp


async def open_requests(request: Request) -> Response:
    if "fail" in request.query_params:
        raise RuntimeError("broken")
    return JSONResponse(request.app.state.guard.open_requests)


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()


@pytest.fixture
def guard() -> GuardedApp:
    app = Starlette(routes=[Route("/", open_requests), WebSocketRoute("/", talk)])
    app.state.guard = GuardedApp(app, "secret")
    guard: GuardedApp = app.state.guard
    return guard


@pytest.mark.parametrize("headers", [{}, {INTERNAL_TOKEN_HEADER: "guessed"}])
def test_others_are_told_whom_to_ask(guard: GuardedApp, headers: dict[str, str]) -> None:
    answer = TestClient(guard).get("/", headers=headers)
    assert answer.status_code == 403
    assert "ask the server's own address" in answer.json()["error"]["message"]


def test_a_handshake_for_another_protocol_is_refused_even_with_the_token(guard: GuardedApp) -> None:
    client = TestClient(guard, headers={INTERNAL_TOKEN_HEADER: "secret"})
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass


def test_open_requests_are_counted_until_they_end_or_fail(guard: GuardedApp) -> None:
    client = TestClient(guard, headers={INTERNAL_TOKEN_HEADER: "secret"})
    assert client.get("/").json() == 1
    with pytest.raises(RuntimeError):
        client.get("/?fail")
    assert guard.open_requests == 0
