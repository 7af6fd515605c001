"""What the gateway adds to requests of a model whose lengths are predicted, and what it learns."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import BadRequest
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.lengths.predict.prediction import LengthQuery, Prediction
from loomserve.platform.lengths.service import Predicted
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.scheduling.policy.hints import EXPECTED, Expected, deadline_of, expected_of
from loomserve.platform.state import ModelStatus
from tests.unit.deployments.gateway.engines import (
    Answer,
    FakeEngines,
    answered,
    replica_route,
)
from tests.unit.platform.fleet.heartbeats import served_model

CHAT = "/v1/chat/completions"
BODY = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = b'{"choices":[{"finish_reason":"stop"}]}'
ALICE = ApiKey(name="alice", hash="sha256:" + "0" * 64, refuse_late=True)
BOB = ApiKey(name="bob", hash="sha256:" + "1" * 64)


class Lengths:
    """Predicts 20 tokens, or nothing, or has not learnt anything yet."""

    def __init__(self, *, predicts: bool, has_learnt: bool) -> None:
        self.predicts, self.has_learnt = predicts, has_learnt
        self.asked = 0
        self.ended_with: list[int] = []
        self.taught_by: list[str] = []

    async def predict(self, model: str, request: dict[str, Any]) -> Predicted | None:
        self.asked += 1
        prediction = Prediction(20.0, 10.0, 45.0, 15.0) if self.has_learnt else None
        query = LengthQuery("", "hi", 1)
        return Predicted(None, query, prediction) if self.predicts else None  # type: ignore[arg-type]

    def ended(self, model: str, predicted: Predicted, tokens: int, key: str) -> None:
        self.ended_with.append(tokens)
        self.taught_by.append(key)


def asked(
    body: dict[str, Any] = BODY,
    path: str = CHAT,
    *,
    predicts: bool = True,
    has_learnt: bool = True,
    answers: int = 1,
    cut_off: bool = False,
    status: int = 200,
    client_leaves: bool = False,
    **state: Any,
) -> tuple[ModelRequest, Lengths, bytes]:
    """One request through the endpoint; it, the predictor, the answer's body."""

    async def answer(request: ModelRequest) -> Answer:
        usage = request.usage
        usage.answers, usage.completion_tokens, usage.cut_off = answers, 26, cut_off
        messages = answered(ANSWER, status=status)
        return messages[:-1] if client_leaves else messages

    route = ModelRoute(
        model=served_model("chat", 2, lengths={"predictor": "chat-v1"}),
        status=ModelStatus.READY, max_model_len=10, replicas=(replica_route("r1"),),
    )  # fmt: skip
    routes: Any = SimpleNamespace(choose=lambda fields, key, preferred=None: route)
    lengths: Any = Lengths(predicts=predicts, has_learnt=has_learnt)
    engines = FakeEngines(answer)
    registry = CollectorRegistry()
    meter = TokenMeter(KeyMetrics(registry), Path("/nowhere"))
    endpoint = ClientEndpoint(
        Server(),
        *(routes, engines, lengths, GatewayMetrics(registry), meter),
        isolates_tenants=False,
    )
    collected = CollectedAnswer()
    given = {"body": json.dumps(body).encode(), "request_id": "1", **state}
    asyncio.run(endpoint({"path": path, "state": given}, never_gone, collected.send))
    assert not endpoint.sequences.total
    return engines.asked[0], lengths, bytes(collected.body)


def test_the_engine_and_the_router_are_told_and_the_predictor_learns_the_real_length() -> None:
    request, lengths, body = asked()
    assert expected_of(json.loads(request.content.encoded)["vllm_xargs"]) == Expected(20.0, 45.0)
    assert (request.expected_tokens, request.median_tokens) == (20.0, 15.0)
    assert lengths.ended_with == [26]
    assert body == ANSWER


def test_without_a_prediction_the_request_goes_on_as_it_came() -> None:
    request, lengths, _ = asked(predicts=False)
    assert request.content.encoded == json.dumps(BODY).encode()
    assert request.expected_tokens is None
    assert lengths.ended_with == []


def test_a_predictor_that_has_not_learnt_anything_tells_nobody_and_learns() -> None:
    request, lengths, _ = asked(has_learnt=False)
    assert request.content.encoded == json.dumps(BODY).encode()
    assert (request.expected_tokens, request.median_tokens) == (None, None)
    assert lengths.ended_with == [26]


def test_only_requests_that_generate_text_are_predicted() -> None:
    _, lengths, _ = asked({"model": "chat", "input": "hi"}, "/v1/embeddings")
    assert lengths.asked == 0


@pytest.mark.parametrize(
    "ends", [{"cut_off": True}, {"answers": 2}, {"status": 500}, {"client_leaves": True}], ids=str
)
def test_an_answer_without_a_length_of_its_own_teaches_nothing(ends: dict[str, Any]) -> None:
    assert asked(**ends)[1].ended_with == []


@pytest.mark.parametrize(("key", "refused"), [(ALICE, True), (BOB, False), (None, False)])
def test_late_requests_are_refused_for_keys_that_say_so(key: ApiKey | None, refused: bool) -> None:
    before = time.monotonic()
    request, _, _ = asked(api_key=key, slo_ms=5000.0)
    deadline = deadline_of(json.loads(request.content.encoded)["vllm_xargs"])
    assert deadline is not None
    assert before + 5 <= deadline <= time.monotonic() + 5
    assert request.refuse_after == (deadline if refused else None)


@pytest.mark.parametrize(("key", "name"), [(BOB, "bob"), (None, "")])
def test_the_predictor_knows_whose_answer_it_was(key: ApiKey | None, name: str) -> None:
    assert asked(api_key=key)[1].taught_by == [name]


def test_a_client_may_not_predict_for_itself() -> None:
    with pytest.raises(BadRequest, match=EXPECTED):
        asked({**BODY, "vllm_xargs": {EXPECTED: [1, 1]}})
