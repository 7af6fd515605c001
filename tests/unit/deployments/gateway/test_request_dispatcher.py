"""Requests for a model that is not ready, at the gateway's dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.request_dispatcher import RequestDispatcher
from loomserve.platform.base.errors import Unavailable, UnknownModel
from loomserve.platform.config import Elastic
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.front_end.engine.serving import ModelServing
from loomserve.platform.http.asgi import never_gone
from loomserve.platform.http.held_answer import COMMENT
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from tests.unit.platform.fleet.heartbeats import FRONT_END, served_model
from tests.waiting import PATIENCE_S

ROUTE = ModelRoute(
    model=served_model(),
    status=ModelStatus.UNLOADED, on_demand=True, max_model_len=None, replicas=(),
)  # fmt: skip

TALKATIVE = Elastic(comment_s=0.01)


def request(*, stream: bool) -> ModelRequest:
    fields = {"model": "m", "prompt": "x", "stream": stream}
    return ModelRequest("m", EngineRequest.of_fields("/v1/completions", fields), "r1")


class Controller:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusal: Exception | None = None

    async def __call__(self, model: str) -> None:
        self.asked.append(model)
        if self.refusal is not None:
            raise self.refusal


Scenario = Callable[[RequestDispatcher, Controller, list[Message]], Awaitable[None]]


def run(scenario: Scenario, elastic: Elastic = TALKATIVE) -> list[Message]:
    messages: list[Message] = []

    async def main() -> None:
        registry, controller = CollectorRegistry(), Controller()
        dispatcher = RequestDispatcher(
            *("token", GatewayMetrics(registry), registry),
            idle_timeout_s=60,
            ask_for=controller,
            elastic=elastic,
        )
        dispatcher.set_models([ROUTE])
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(dispatcher, controller, messages)
        finally:
            await dispatcher.close()

    asyncio.run(main())
    return messages


def dispatched(
    dispatcher: RequestDispatcher,
    messages: list[Message],
    *,
    stream: bool,
    receive: Callable[[], Awaitable[Any]] = never_gone,
) -> asyncio.Task[None]:
    async def send(message: Message) -> None:
        messages.append(message)

    return asyncio.create_task(dispatcher.dispatch(request(stream=stream), receive, send))


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused_before_anything_was_said_is_an_error_of_its_own(stream: bool) -> None:
    async def scenario(
        dispatcher: RequestDispatcher, controller: Controller, messages: list[Message]
    ) -> None:
        controller.refusal = Unavailable("no room", reason="no_room", retry_after_s=5)
        with pytest.raises(Unavailable, match="no room"):
            await dispatched(dispatcher, messages, stream=stream)

    assert run(scenario) == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_hears_comments_and_what_is_no_stream_nothing(stream: bool) -> None:
    async def scenario(
        dispatcher: RequestDispatcher, controller: Controller, messages: list[Message]
    ) -> None:
        waiting = dispatched(dispatcher, messages, stream=stream)
        await asyncio.sleep(0.1)
        dispatcher.set_models([])
        with pytest.raises(UnknownModel, match="was unloaded"):
            await waiting
        assert controller.asked == ["m"]

    messages = run(scenario)
    assert bool(messages) is stream
    if stream:
        assert messages[0]["status"] == 200
        assert {message["body"] for message in messages[1:]} == {COMMENT}


def test_who_has_come_to_a_model_that_is_there_waits_for_it_no_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_: ModelServing) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelServing, "start", never)
    patient = Elastic(wait_timeout_s=0.5)

    async def scenario(
        dispatcher: RequestDispatcher, controller: Controller, messages: list[Message]
    ) -> None:
        ready = {"status": ModelStatus.READY, "front_end": FRONT_END}
        dispatcher.set_models([ROUTE.model_copy(update=ready)])
        assert dispatcher._bounds.reroute_timeout_s == patient.wait_timeout_s
        waiting = dispatched(dispatcher, messages, stream=False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), patient.wait_timeout_s / 2)
        with pytest.raises(Unavailable, match="not set up yet"):
            await waiting

    assert run(scenario, patient) == []


def test_a_client_that_leaves_while_it_waits_is_let_go() -> None:
    async def scenario(
        dispatcher: RequestDispatcher, controller: Controller, messages: list[Message]
    ) -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        waiting = dispatched(dispatcher, messages, stream=False, receive=receive)
        await asyncio.sleep(0.05)
        assert dispatcher._cold_starts.waiting("m") == 1
        gone.set()
        await waiting
        assert dispatcher._cold_starts.waiting("m") == 0

    assert run(scenario) == []
