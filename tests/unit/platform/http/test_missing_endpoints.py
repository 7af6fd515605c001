"""Who asks a model for an endpoint that it lacks is told which it has."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from loomserve.platform.http.engine_errors import normalise
from loomserve.platform.http.missing_endpoints import MissingEndpoints
from loomserve.platform.requests.engine_request import FORWARDED, engine_path


def chat_model() -> FastAPI:
    app, router = FastAPI(), APIRouter()

    @router.post("/v1/chat/completions")
    @router.post("/tokenize")
    async def answer() -> str:
        return "answered"

    app.include_router(router)
    return app


@pytest.mark.anyio
async def test_the_endpoints_of_a_model_are_named_as_clients_know_them() -> None:
    app = MissingEndpoints(chat_model(), {engine_path(path): path for path in FORWARDED})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        assert (await http.post("/v1/chat/completions")).json() == "answered"
        assert (await http.post("/tokenize")).json() == "answered"
        refused = await http.post("/v1/embeddings", json={})
        assert refused.status_code == 404
        assert (await http.get("/nothing")).json() == {"detail": "Not Found"}
    # As the gateway passes it on.
    assert normalise(refused.content, 404)["error"] == {
        "message": "This model does not answer /v1/embeddings. It answers /v1/chat/completions, "
        "/v1/tokenize.",
        "type": "invalid_request_error",
        "param": None,
        "code": "endpoint_not_found",
    }
    assert json.loads(refused.content)["error"]["code"] == "endpoint_not_found"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
