"""A replica's server after its engine has ended: what was lost is told from what came too late."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from loomserve.platform.http.dead_engine import DeadEngineApp, EngineEndedError


class Engine:
    """An application whose engine ends with requests that say so."""

    def __init__(self) -> None:
        self.dead = False
        routes = [
            Route("/fails", self.fails, methods=["POST"]),
            Route("/streams", self.streams, methods=["POST"]),
            Route("/metrics", self.fails),
        ]
        self.client = TestClient(DeadEngineApp(Starlette(routes=routes), lambda: self.dead))

    async def fails(self, request: Request) -> Response:
        self.dead = "dies" in request.query_params
        return JSONResponse({"error": "words"}, 500)

    async def streams(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            self.dead = "dies" in request.query_params

        return StreamingResponse(events(), media_type="text/event-stream")


def test_a_request_with_which_the_engine_ended_is_told_from_one_on_which_it_failed() -> None:
    engine = Engine()
    assert engine.client.post("/fails").status_code == 500
    assert engine.client.post("/fails?dies").status_code == 502


def test_a_request_that_comes_too_late_is_not_taken() -> None:
    engine = Engine()
    engine.dead = True
    late = engine.client.post("/fails")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
    assert engine.client.get("/metrics").status_code == 500, "it can still be looked at"


def test_a_stream_in_whose_midst_the_engine_ended_does_not_end_as_if_it_were_whole() -> None:
    engine = Engine()
    assert engine.client.post("/streams").text == "data: 1\n\n"
    with pytest.raises(EngineEndedError):
        engine.client.post("/streams?dies")
