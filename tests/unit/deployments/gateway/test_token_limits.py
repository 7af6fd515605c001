"""Keys with limits of tokens at the clients' endpoint, with engines that stream as vLLM does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Send

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import EngineGone, TooManyRequests, Unavailable
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.http.held_answer import COMMENT
from loomserve.platform.requests.metrics import GatewayMetrics
from tests.unit.deployments.gateway.engines import FakeEngines, one_model

CHAT = "/v1/chat/completions"
PROMPT = 30
FREE = ApiKey(name="free", hash="sha256:" + "0" * 64)
LIMITED = FREE.model_copy(update={"name": "limited", "tokens_per_minute": 6000})
A_TOKEN_S = 0.01


class Engine(FakeEngines):
    """Answers ``max_tokens`` tokens, of which the client gets as many as ``user`` says, if set."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self.gateway = gateway
        self.bodies: list[bytes] = []
        self.computed = 0

    async def dispatch(self, request: ModelRequest, receive: Receive, send: Send) -> None:
        self.bodies.append(request.content.encoded)
        body = json.loads(request.content.encoded)
        user = str(body.get("user"))
        if user == "refused":
            raise Unavailable("no replica")
        if user == "fails":
            self._computes(request, 3)
            raise EngineGone("the engine has ended", reason="engine_gone")
        if user == "leaves":
            request.usage.add_unanswered("p", PROMPT)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if "waits" in user:
            for _ in range(3):
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            if user == "waits in vain":
                raise Unavailable("no room")
        self.computed += PROMPT
        for done in range(1, body["max_tokens"] + 1):
            self.gateway.now_s += A_TOKEN_S
            self.computed += 1
            self._computes(request, 1)
            event = b"data: " + json.dumps({"choices": [{"delta": {"content": "x"}}]}).encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if str(done) == user:
                return
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _computes(self, request: ModelRequest, tokens: int) -> None:
        request.usage.add_prompt("p", PROMPT, 0)
        request.usage.completion_tokens += tokens


class Gateway:
    """The endpoint, with a clock that only engines move."""

    def __init__(self, file: Path) -> None:
        self.now_s = 1000.0
        self.registry = CollectorRegistry()
        meter = TokenMeter(KeyMetrics(self.registry), file, clock=lambda: self.now_s)
        routes = one_model()
        lengths: Any = SimpleNamespace(predict=_nothing)
        self.engine = Engine(self)
        self.endpoint = ClientEndpoint(
            Server(),
            routes,
            self.engine,
            lengths,
            GatewayMetrics(self.registry),
            meter,
            isolates_tenants=False,
        )

    async def ask(self, key: ApiKey, max_tokens: int = 5, **fields: Any) -> CollectedAnswer:
        body = {"model": "m", "messages": [], "max_tokens": max_tokens, "stream": True, **fields}
        answer = Noted()
        state = {"body": json.dumps(body).encode(), "request_id": "1", "api_key": key}
        await self.endpoint({"path": CHAT, "state": state}, never_gone, answer.send)
        return answer

    def charged(self, key: ApiKey) -> float:
        name = "loomserve_key_tokens_total"
        return sum(
            self.registry.get_sample_value(name, {"key": key.name, "kind": kind}) or 0
            for kind in ("prompt", "completion")
        )


class Noted(CollectedAnswer):
    headers: dict[bytes, bytes]

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        await super().send(message)


async def _nothing(*_: object) -> None:
    return None


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path / "tokens.json")


@pytest.mark.parametrize("asks", [None, {"include_usage": True}, {"include_usage": False}])
def test_a_stream_is_charged_whatever_it_tells_and_passes_as_it_is(
    gateway: Gateway, asks: dict[str, Any] | None
) -> None:
    options = {} if asks is None else {"stream_options": asks}
    limited = asyncio.run(gateway.ask(LIMITED, **options))
    free = asyncio.run(gateway.ask(FREE, **options))
    assert limited.body == free.body
    assert limited.body.count(b"data: ") == 6
    for body in gateway.engine.bodies:
        assert json.loads(body).get("stream_options") == asks
    assert gateway.charged(LIMITED) == gateway.charged(FREE) == PROMPT + 5


def test_a_stream_that_is_cut_off_is_charged_so_far(gateway: Gateway) -> None:
    asyncio.run(gateway.ask(LIMITED, 100, user="3"))
    assert gateway.charged(LIMITED) == PROMPT + 3


def test_what_no_engine_takes_costs_nothing(gateway: Gateway) -> None:
    with pytest.raises(Unavailable):
        asyncio.run(gateway.ask(LIMITED, user="refused"))
    assert gateway.charged(LIMITED) == 0


def test_an_answer_that_fails_before_it_begins_costs_nothing(gateway: Gateway) -> None:
    with pytest.raises(EngineGone):
        asyncio.run(gateway.ask(LIMITED, user="fails"))
    assert gateway.charged(LIMITED) == 0


def test_a_prompt_costs_its_tokens_though_its_client_does_not_wait(gateway: Gateway) -> None:
    asyncio.run(gateway.ask(LIMITED, user="leaves"))
    assert gateway.charged(LIMITED) == PROMPT


def test_comments_of_a_stream_that_waits_cost_nothing(gateway: Gateway) -> None:
    answer = asyncio.run(gateway.ask(LIMITED, user="waits"))
    assert bytes(answer.body).startswith(3 * COMMENT)
    assert gateway.charged(LIMITED) == PROMPT + 5
    with pytest.raises(Unavailable):
        asyncio.run(gateway.ask(LIMITED, user="waits in vain"))
    assert gateway.charged(LIMITED) == PROMPT + 5


def test_over_ten_minutes_the_limit_holds_with_streams_that_are_cut_off(gateway: Gateway) -> None:
    began_s = gateway.now_s
    refused = 0

    async def scenario() -> None:
        nonlocal refused
        number = 0
        while gateway.now_s < began_s + 600:
            number += 1
            try:
                # A third of the streams is cut off half-way.
                cut = {"user": str(number % 97 + 1)} if number % 3 == 0 else {}
                await gateway.ask(LIMITED, number % 97 * 2 + 2, **cut)
            except TooManyRequests as refusal:
                refused += refusal.code == "token_limit_exceeded"
                gateway.now_s += (refusal.retry_after_s or 0) + 1e-6

    asyncio.run(scenario())
    assert refused > 100
    assert gateway.engine.computed == gateway.charged(LIMITED)
    # Engines move the clock, so the last request ends some seconds after the tenth minute.
    minutes = (gateway.now_s - began_s) / 60
    assert gateway.engine.computed == pytest.approx(6000 * minutes, rel=0.02)


def test_a_limited_key_is_told_what_is_left_and_others_are_not(gateway: Gateway) -> None:
    first, second = (asyncio.run(gateway.ask(LIMITED)) for _ in range(2))
    assert first.headers[b"x-ratelimit-remaining-tokens"] == b"1000"
    # Meanwhile five tokens took 50 ms, in which five came back.
    assert second.headers[b"x-ratelimit-remaining-tokens"] == b"965"
    assert asyncio.run(gateway.ask(FREE)).headers == {}
