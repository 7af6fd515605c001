"""What the gateway tells of a request in its trace, and what vLLM's server is told of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.relay import relay
from loomserve.deployments.gateway.replica_choice import AnswerContext
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.tracing import RequestTrace
from tests.unit.deployments.gateway.test_replica_choice import Bench, stats
from tests.unit.deployments.gateway.test_request_dispatcher import ROUTE, run
from tests.unit.platform.tracing.spans import (
    UNSAMPLED,
    Spans,
    attributes,
    events,
    id_of,
    parent_of,
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def request(trace: RequestTrace | None) -> ModelRequest:
    body = b'{"model": "m", "prompt": "a"}'
    content = EngineRequest("/v1/completions", json.loads(body), body)
    return ModelRequest("m", content, "id-1", trace=trace)


def context(trace: RequestTrace | None) -> AnswerContext:
    asked = request(trace)
    return AnswerContext(request=asked, trace=asked.recorded)


def test_a_choice_is_told_with_its_policy_and_reason() -> None:
    spans, bench = Spans(), Bench(busy=stats(waiting=5), idle=stats())
    trace = spans.begin()
    assert bench.choice.choose(bench.routing(context=context(trace))) == "idle"
    trace.end(200)
    (server,) = spans.all
    told = events(server)["route"]
    reason = told.pop("loomserve.reason")
    assert bench.ledger.decisions()["m", "prefix_aware", reason] == 1
    assert told == {
        "loomserve.sequence": "id",
        "loomserve.replica": "idle",
        "loomserve.policy": "prefix_aware",
        "loomserve.candidates": 2,
        "loomserve.attempt": 0,
        "loomserve.prompt_only": False,
    }


def test_a_wait_for_a_replica_is_a_span() -> None:
    spans, bench = Spans(), Bench(r=stats(draining=True))
    trace = spans.begin()
    waits = context(trace)
    for _ in range(2):
        assert bench.choice.choose(bench.routing(context=waits)) is None
    assert spans.names == []
    waits.goes_on()
    assert spans.names == ["wait_for_replica"]


def answered(app: App, asked: AnswerContext) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    collected = CollectedAnswer()
    asyncio.run(relay(app, asked, never_gone, collected.send, metrics, idle_timeout_s=10))
    assert collected.status == 200


@pytest.mark.parametrize("sampled", [True, False])
def test_vllms_server_gets_the_headers_of_the_gateways_span(sampled: bool) -> None:
    seen: dict[bytes, bytes] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope["headers"])
        await JSONResponse({})(scope, receive, send)

    spans = Spans()
    given = [] if sampled else [(b"traceparent", UNSAMPLED.encode())]
    trace = spans.tracer.begin("x", {}, headers=given)
    answered(app, context(trace))
    trace.end(200)
    assert [seen[b"traceparent"]] == [value for _, value in trace.headers]
    flags = int(seen[b"traceparent"][-2:], 16)
    assert bool(flags & 1) == sampled
    assert len(spans.all) == sampled


def test_without_a_trace_it_gets_none() -> None:
    seen: dict[bytes, bytes] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope["headers"])
        await JSONResponse({})(scope, receive, send)

    answered(app, context(None))
    assert b"traceparent" not in seen


@pytest.mark.parametrize(("kind", "told"), [("text/event-stream", 1), ("application/json", 0)])
def test_a_streams_first_token_is_told_once(kind: str, told: int) -> None:
    spans = Spans()
    trace = spans.begin()
    asked = context(trace)

    async def pieces() -> Any:
        for piece in (b"a", b"b"):
            asked.usage.outputs += 1
            yield piece

    answered(StreamingResponse(pieces(), media_type=kind), asked)
    trace.end(200)
    (server,) = spans.all
    assert [each.name for each in server.events] == ["first_token"] * told


def test_a_wait_for_a_model_is_a_span_of_its_own() -> None:
    spans = Spans()
    trace = spans.begin()

    async def scenario(dispatcher: Any, controller: Any, messages: Any) -> None:
        controller.refusal = Unavailable("no room", reason="no_room")
        with pytest.raises(Unavailable, match="no room"):
            await dispatcher.dispatch(request(trace), never_gone, CollectedAnswer().send)

    run(scenario)
    trace.end(503)
    wait, server = spans.all
    assert wait.name == "wait_for_model"
    assert attributes(wait) == {"loomserve.model": ROUTE.name}
    assert wait.status.description == "Unavailable"
    assert parent_of(wait) == id_of(server)
