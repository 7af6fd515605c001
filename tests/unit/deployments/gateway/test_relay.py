"""What a front end in the gateway's process answers, as a client gets it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.relay import relay
from loomserve.deployments.gateway.replica_choice import AnswerContext
from loomserve.platform.base.errors import EngineGone, InternalError, TooManyRequests, Unavailable
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.http.asgi import ClientGoneError, CollectedAnswer, never_gone
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics

pytestmark = pytest.mark.anyio
BODY = b'{"model": "m", "prompt": "a"}'
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def routing() -> RoutingRequest:
    return RoutingRequest("id", "id", [1], 16, frozenset({"r1"}))


class Asked:
    """One request to an application, and what came of it."""

    def __init__(self, path: str = "/v1/completions") -> None:
        content = EngineRequest(path, json.loads(BODY), BODY)
        self.context = AnswerContext(request=ModelRequest("m", content, "id-1"))
        self.receive: Receive = never_gone
        self.collected = CollectedAnswer()
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics(self.registry)
        self.metrics.set_models({"m": ["r1"]})

    async def by(self, app: App, idle_timeout_s: float = 60) -> tuple[int, bytes]:
        await relay(
            *(app, self.context, self.receive, self.collected.send, self.metrics),
            idle_timeout_s=idle_timeout_s,
        )
        return self.collected.status, bytes(self.collected.body)


async def test_an_application_gets_the_clients_bytes_path_and_request_id() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(path=scope["path"], headers=dict(scope["headers"]), body=await receive())
        await JSONResponse({"good": True})(scope, receive, send)

    assert await Asked("/v1/tokenize").by(app) == (200, b'{"good":true}')
    assert seen["path"] == "/tokenize"
    assert seen["headers"][b"x-request-id"] == b"id-1"
    assert seen["body"]["body"] == BODY


async def test_a_refusal_is_written_in_openais_shape() -> None:
    refusal = JSONResponse({"error": {"message": "no", "type": "x", "code": 400}}, 400)
    status, body = await Asked().by(refusal)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_request"


async def test_a_failure_of_the_application_is_an_error_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def raises(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("its own affair")

    async def gives_up(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    for app in (JSONResponse({"error": {"message": "secret"}}, 500), raises, gives_up):
        with caplog.at_level(logging.ERROR), pytest.raises(InternalError, match="id-1") as failed:
            await Asked().by(app)
        assert failed.value.code == "engine_failed"
        assert "secret" not in failed.value.message
    # The operator finds the application's own words by the request's id.
    assert any("id-1" in text and "secret" in text for text in caplog.messages)


async def test_an_error_of_the_platforms_own_is_raised_as_it_is() -> None:
    async def not_there(scope: Scope, receive: Receive, send: Send) -> None:
        raise Unavailable("not yet")

    with pytest.raises(Unavailable):
        await Asked().by(not_there)


@pytest.mark.parametrize("failure", [EngineGone("gone"), Unavailable("away", retry_after_s=5)])
async def test_what_the_front_end_ended_a_request_with_is_raised_before_an_answer_has_begun(
    failure: EngineGone | Unavailable,
) -> None:
    asked = Asked()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.context.failure = failure
        await JSONResponse({"error": {"message": "as vLLM says it"}}, 503)(scope, receive, send)

    with pytest.raises(type(failure)) as raised:
        await asked.by(app)
    assert raised.value is failure
    assert asked.collected.status == 0


async def test_what_the_front_end_ended_a_stream_with_is_raised_in_the_place_of_its_words() -> None:
    asked = Asked()

    async def events() -> Any:
        yield b"data: 1\n\n"
        asked.context.failure = EngineGone("gone")
        yield b'data: {"error": "as vLLM says it"}\n\n'
        yield b"data: [DONE]\n\n"

    with pytest.raises(EngineGone):
        await asked.by(StreamingResponse(events(), media_type="text/event-stream"))
    assert bytes(asked.collected.body) == b"data: 1\n\n"


async def test_a_stream_that_no_replica_takes_is_told_so_by_its_status() -> None:
    asked = Asked()

    async def events() -> Any:
        asked.context.failure = TooManyRequests("too late")
        yield b'data: {"error": "as vLLM says it"}\n\n'

    with pytest.raises(TooManyRequests):
        await asked.by(StreamingResponse(events(), media_type="text/event-stream"))
    assert asked.collected.status == 0, "who raises it may still write another"


async def test_a_stream_begins_once_its_replica_is_chosen() -> None:
    asked, seen = Asked(), list[int]()

    async def events() -> Any:
        seen.append(asked.collected.status)
        for _ in range(2):
            asked.context.is_chosen()
        await asyncio.sleep(0)
        seen.append(asked.collected.status)
        yield b"data: 1\n\n"

    stream = StreamingResponse(events(), media_type="text/event-stream")
    assert await asked.by(stream) == (200, b"data: 1\n\n")
    assert seen == [0, 200]


async def test_a_stream_is_counted_once_it_is_whole_from_its_engines_first_piece_on() -> None:
    asked = Asked()

    async def events() -> Any:
        yield b"event: response.created\n\n"
        await asyncio.sleep(0.1)
        for _ in range(3):
            asked.context.usage.outputs += 1
            yield b"data: 1\n\n"

    await asked.by(StreamingResponse(events(), media_type="text/event-stream; charset=utf-8"))

    def value(name: str) -> float | None:
        return asked.registry.get_sample_value(name, {"model": "m"})

    assert value("loomserve_time_to_first_token_seconds_count") == 1
    assert (value("loomserve_time_to_first_token_seconds_sum") or 0) >= 0.1
    assert value("loomserve_time_per_output_token_seconds_count") == 1


async def test_an_answer_that_stands_still_is_ended() -> None:
    async def events() -> Any:
        yield b"data: 1\n\n"
        await asyncio.sleep(30)

    asked = Asked()
    asked.context.usage.outputs = 1
    with pytest.raises(EngineGone) as stalled:
        await asked.by(StreamingResponse(events(), media_type="text/event-stream"), 0.2)
    assert stalled.value.code == "engine_stalled"


async def test_an_answer_whose_prompt_waits_is_not_ended_though_its_stream_has_begun() -> None:
    asked = Asked()

    async def events() -> Any:
        yield b"event: response.created\n\n"
        await asyncio.sleep(0.5)
        yield b"data: 1\n\n"

    app = StreamingResponse(events(), media_type="text/event-stream")
    assert (await asked.by(app, 0.2))[0] == 200


async def test_an_answer_whose_engine_goes_on_is_not_ended_though_its_client_gets_nothing() -> None:
    asked = Asked()

    async def events() -> Any:
        yield b"data: 1\n\n"
        for _ in range(10):
            asked.context.usage.outputs += 1
            await asyncio.sleep(0.05)

    app = StreamingResponse(events(), media_type="text/event-stream")
    assert (await asked.by(app, 0.2))[0] == 200


async def test_an_answer_that_may_wait_at_its_engine_is_not_ended() -> None:
    asked = Asked()
    asked.context.usage.outputs = 1
    waiting = True
    asked.context.queues[routing()] = lambda: waiting

    async def events() -> Any:
        nonlocal waiting
        yield b"data: 1\n\n"
        await asyncio.sleep(0.5)
        waiting = False
        await asyncio.sleep(30)

    started = time.monotonic()
    with pytest.raises(EngineGone):
        await asked.by(StreamingResponse(events(), media_type="text/event-stream"), 0.2)
    assert time.monotonic() - started > 0.5


@pytest.mark.parametrize("steps", [7, None])
async def test_an_answer_whose_engine_takes_no_step_or_has_only_got_it_is_not_ended(
    steps: int | None,
) -> None:
    asked = Asked()
    asked.context.usage.outputs = 1
    taken = steps
    asked.context.engines["r"] = lambda: taken

    async def events() -> Any:
        nonlocal taken
        yield b"data: 1\n\n"
        await asyncio.sleep(0.5)
        for step in range(10_000):
            taken = step
            await asyncio.sleep(0.001)

    started = time.monotonic()
    with pytest.raises(EngineGone):
        await asked.by(StreamingResponse(events(), media_type="text/event-stream"), 0.2)
    assert time.monotonic() - started > 0.5


async def test_an_answer_that_is_slow_is_not_ended() -> None:
    async def events() -> Any:
        # The first byte may take longer.
        await asyncio.sleep(0.6)
        for _ in range(8):
            yield b"data: 1\n\n"
            await asyncio.sleep(0.1)

    app = StreamingResponse(events(), media_type="text/event-stream")
    assert await Asked().by(app, 0.4) == (200, b"data: 1\n\n" * 8)


async def test_a_client_that_is_behind_is_no_standstill() -> None:
    asked = Asked()
    collect = asked.collected.send

    async def slow(message: Any) -> None:
        await asyncio.sleep(0.5 if message.get("body") else 0)
        await collect(message)

    async def events() -> Any:
        yield b"data: 1\n\n"

    app = StreamingResponse(events(), media_type="text/event-stream")
    await relay(app, asked.context, asked.receive, slow, asked.metrics, idle_timeout_s=0.2)
    assert bytes(asked.collected.body) == b"data: 1\n\n"


class Handled:
    """An application that has its own task for a request, as vLLM's does, and listens."""

    def __init__(self) -> None:
        self.aborted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.aborted = True
                raise

        await receive()
        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert (await receive())["type"] == "http.disconnect"
        working.cancel()
        await JSONResponse(None)(scope, receive, send)


async def test_a_client_that_goes_has_its_request_given_up() -> None:
    async def leaves() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    asked, app = Asked(), Handled()
    asked.receive = leaves
    with pytest.raises(ClientGoneError):
        await asked.by(app)
    assert app.aborted
    assert asked.collected.status == 0


async def test_a_request_that_takes_too_long_is_given_up() -> None:
    asked, app = Asked(), Handled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asked.by(app)
    assert app.aborted
