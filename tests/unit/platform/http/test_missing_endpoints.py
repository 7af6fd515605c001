"""Who asks a model for an endpoint that it lacks is told which it has."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from loomserve.platform.base.errors import NotFound
from loomserve.platform.http import missing_endpoints
from loomserve.platform.http.ingress.paths import nothing_at
from loomserve.platform.http.missing_endpoints import MissingEndpoints


def model(*paths: str) -> FastAPI:
    app, router = FastAPI(), APIRouter()
    for path in paths:
        router.add_api_route(path, lambda: "answered", methods=["POST"])
    app.include_router(router)
    return app


@pytest.mark.anyio
async def test_a_model_answers_what_it_has_and_names_it_to_who_asks_for_more() -> None:
    app = MissingEndpoints("m", model("/v1/chat/completions", "/tokenize"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        assert (await http.post("/v1/chat/completions")).json() == "answered"
        assert (await http.post("/tokenize")).json() == "answered"
        assert (await http.get("/nothing")).json() == {"detail": "Not Found"}
        with pytest.raises(NotFound) as refused:
            await http.post("/rerank", json={})
    assert refused.value.body()["error"] == {
        "message": "The model 'm' does not rerank. Its tasks are: chat (/v1/chat/completions), "
        "tokenize (/v1/tokenize).",
        "type": "invalid_request_error",
        "param": "model",
        "code": "endpoint_not_found",
    }


def test_a_route_whose_handler_vllm_left_out_is_missing() -> None:
    app = model("/v1/embeddings", "/pooling")
    app.state.serving_embedding, app.state.serving_pooling = None, object()
    there = MissingEndpoints("m", app)
    there.check("/pooling")
    with pytest.raises(NotFound, match=r"does not embed\. Its tasks are: pool "):
        there.check("/v1/embeddings")


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_that_hears_needs_what_reads_sound(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/audio/transcriptions"
    monkeypatch.setattr(missing_endpoints, "_reads_sound", lambda: installed)
    there = MissingEndpoints("m", model(path))
    if installed:
        there.check(path)
    else:
        with pytest.raises(NotFound, match=r"can transcribe, but .* loomserve\[audio\]"):
            there.check(path)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses/resp_1", "send the whole conversation"),
        ("/v1/responses/resp_1/cancel", "send the whole conversation"),
        ("/v1/assistants", "send the whole conversation"),
        ("/v1/threads/t/runs", "send the whole conversation"),
        ("/v1/realtime", "/v1/audio/transcriptions"),
        ("/v1/vector_stores", "/v1/embeddings"),
        ("/cohere/v2/chat", "/v1/chat/completions"),
    ],
)
def test_what_would_keep_state_is_refused_by_name(path: str, instead: str) -> None:
    told = nothing_at(path).message
    assert told.startswith(f"{path} is not served: ")
    assert instead in told


def test_of_other_paths_nothing_is_known() -> None:
    assert nothing_at("/v1/responsesx").message == (
        "There is nothing at /v1/responsesx. The OpenAI API is under /v1."
    )
    assert "/admin/v1" in nothing_at("/x", admin=True).message


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
