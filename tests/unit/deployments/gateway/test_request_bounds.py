"""What one request may cost: through the real middleware and endpoint, to whoever answers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.request_meter import ModelMeter
from loomserve.platform.access.shared_counts import Count, Counts, SharedCounts
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.http.asgi import CollectedAnswer, DirectPosts
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.requests.engine_request import FORWARDED
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from tests.unit.deployments.gateway.engines import (
    Answer,
    Behave,
    FakeEngines,
    good,
    replica_route,
)
from tests.unit.platform.fleet.heartbeats import served_model
from tests.unit.platform.requests.test_client_body import NASTY

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTE = ModelRoute(
    model=served_model(most=130),
    status=ModelStatus.READY, max_model_len=8192,
    replicas=(replica_route("r1"),),
)  # fmt: skip
SERVER = Server(
    api_keys=(
        ApiKey(name="free", hash=hash_key("lsk-free")),
        ApiKey(name="tight", hash=hash_key("lsk-tight"), max_concurrent=4),
        ApiKey(name="first", hash=hash_key("lsk-first"), first_priority=-5),
    )
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class NoLengths:
    async def predict(self, model: str, fields: Any) -> None:
        return None


def platform(behave: Behave = good, counts: Counts | None = None) -> tuple[ASGIApp, FakeEngines]:
    engines = FakeEngines(behave)
    routes: Any = SimpleNamespace(choose=lambda fields, key: ROUTE)
    lengths: Any = NoLengths()
    registry = CollectorRegistry()
    clients = ClientEndpoint(
        Server(),
        *(routes, engines, lengths, GatewayMetrics(registry)),
        TokenMeter(KeyMetrics(registry), Path("/nowhere")),
        isolates_tenants=True,
        sequences=ModelMeter(counts),
    )
    app = DirectPosts(
        dict.fromkeys(FORWARDED, clients),
        Starlette(exception_handlers=exception_handlers),
    )
    return ingress_middleware(app, SERVER, rejected=lambda _: None), engines


async def ask(
    app: ASGIApp, path: str, body: bytes, key: str = "lsk-free"
) -> tuple[int, dict[str, Any]]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        never: Message = await asyncio.get_running_loop().create_future()
        return never

    answer = CollectedAnswer()
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "scheme": "http", "http_version": "1.1",
        "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1),
        "headers": [(b"authorization", b"Bearer " + key.encode())],
    }  # fmt: skip
    await app(scope, receive, answer.send)
    return answer.status, json.loads(answer.body)


def prompts(number: int, n: int) -> bytes:
    return json.dumps({"model": "m", "prompt": ["x"] * number, "n": n}).encode()


@pytest.mark.parametrize("n", ["+8", "1_6", "16.0", "0016", 16.0, True, "8"])
async def test_a_number_of_answers_in_another_spelling_reaches_no_engine(n: Any) -> None:
    app, engines = platform()
    for padding in (b"", b" " * 2**18):
        body = json.dumps({"model": "m", "messages": [], "n": n}).encode() + padding
        status, answer = await ask(app, CHAT, body, "lsk-tight")
        assert (status, answer["error"]["param"], engines.asked) == (400, "n", [])


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [
        ("lsk-free", 0, 200),
        ("lsk-free", 7, 200),
        ("lsk-free", -1, 400),
        ("lsk-first", -5, 200),
        ("lsk-first", -6, 400),
        ("lsk-first", "-5", 400),
    ],
)
async def test_a_key_has_its_first_priority(key: str, priority: Any, status: int) -> None:
    app, engines = platform()
    for path, prompt in ((CHAT, "messages"), (COMPLETIONS, "prompt"), ("/v1/embeddings", "input")):
        body = json.dumps({"model": "m", prompt: ["x"], "priority": priority}).encode()
        answered, answer = await ask(app, path, body, key)
        assert answered == status, answer
        if status == 400:
            assert answer["error"]["param"] == "priority"
    assert len(engines.asked) == (3 if status == 200 else 0)


@pytest.mark.parametrize(("number", "n"), [(1024, 128), (1024, 1), (2, 65), (129, 1)])
async def test_prompts_times_answers_beyond_the_bound_reach_no_engine(number: int, n: int) -> None:
    app, engines = platform()
    status, body = await ask(app, COMPLETIONS, prompts(number, n))
    assert (status, engines.asked) == (400, [])
    assert body["error"]["param"] in ("prompt", "n")
    assert str(number * n) in body["error"]["message"]


@pytest.mark.parametrize(("number", "n"), [(128, 1), (1, 128), (16, 8)])
async def test_prompts_times_answers_within_the_bound_pass(number: int, n: int) -> None:
    app, _ = platform()
    assert (await ask(app, COMPLETIONS, prompts(number, n)))[0] == 200


async def test_sequences_count_in_the_limits_of_keys_and_models_until_they_end() -> None:
    inside, go = asyncio.Event(), asyncio.Event()

    async def waits(request: ModelRequest) -> Answer:
        if request.content.fields["prompt"] == ["x"] * 125:
            inside.set()
            await go.wait()
        return await good(request)

    app, _ = platform(waits)
    assert (await ask(app, COMPLETIONS, prompts(5, 1), "lsk-tight"))[0] == 400
    assert (await ask(app, COMPLETIONS, prompts(2, 2), "lsk-tight"))[0] == 200
    running = asyncio.create_task(ask(app, COMPLETIONS, prompts(125, 1)))
    await inside.wait()
    status, body = await ask(app, COMPLETIONS, prompts(6, 1))
    assert (status, body["error"]["code"]) == (429, "model_overloaded")
    assert (await ask(app, COMPLETIONS, prompts(5, 1)))[0] == 200
    go.set()
    assert (await running)[0] == 200
    assert (await ask(app, COMPLETIONS, prompts(128, 1)))[0] == 200
    assert (await ask(app, COMPLETIONS, prompts(2, 2), "lsk-tight"))[0] == 200


@pytest.mark.parametrize("name", NASTY)
async def test_a_large_body_of_any_shape_costs_the_loop_little(name: str) -> None:
    app, engines = platform()
    await ask(app, CHAT, b'{"messages": []}')
    # Processor time, which other processes of the machine do not lengthen. The loop stood
    # still for 1.1 s of it on the first of these bodies while it was read whole.
    began = time.thread_time()
    status, body = await ask(app, CHAT, NASTY[name])
    took_s = time.thread_time() - began
    assert status == 400, body
    assert took_s < 0.3
    assert len(engines.asked) == 1


async def test_a_large_body_that_is_sound_goes_to_the_engine_with_what_was_added() -> None:
    picture = "data:image/png;base64," + "A" * (6 * 2**20)
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "?"}]
    sent = {"model": "m", "messages": [{"role": "user", "content": content}], "stop": ["."]}
    app, engines = platform()
    assert (await ask(app, CHAT, json.dumps(sent).encode()))[0] == 200
    received = json.loads(engines.asked[0].content.encoded)
    assert received.pop("cache_salt")
    assert received == sent


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
        ("/v1/tokenize", {"prompt": "word " * 40_000}),
        ("/v1/responses", {"input": "word " * 40_000}),
    ],
)
async def test_a_text_that_cannot_fit_reaches_no_tokenizer(
    path: str, fields: dict[str, Any]
) -> None:
    app, engines = platform()
    status, body = await ask(app, path, json.dumps({"model": "m", **fields}).encode())
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "8192" in body["error"]["message"]
    assert engines.asked == []


async def test_a_models_limit_holds_over_all_gateways(tmp_path: Path) -> None:
    one, other = SharedCounts(tmp_path, 2), SharedCounts(tmp_path, 2)
    other.add("model m", Count.RUNNING, 129)
    app, _ = platform(counts=one)
    assert (await ask(app, COMPLETIONS, prompts(1, 1)))[0] == 200
    status, body = await ask(app, COMPLETIONS, prompts(2, 1))
    assert (status, body["error"]["code"]) == (429, "model_overloaded")
    other.add("model m", Count.RUNNING, -1)
    assert (await ask(app, COMPLETIONS, prompts(2, 1)))[0] == 200
    assert other.running_elsewhere("model m") == 0
    one.close()
    other.close()
