"""A batch's line at a gateway: in its key's name, within bounds, marked as what may wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from loomserve.deployments.batch.executor import outcome
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import Forbidden
from loomserve.platform.batch.executor import LineOutcome
from loomserve.platform.config import ApiKey, Model, Server
from loomserve.platform.fleet.messages import LineRequest, ModelRoute
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.hints import DEADLINE, is_background
from loomserve.platform.state import ModelStatus
from loomserve.platform.tracing import RequestTracer
from tests.unit.deployments.gateway.engines import (
    Answer,
    FakeEngines,
    answered,
    replica_route,
)
from tests.unit.platform.tracing.spans import Spans, attributes, id_of

KEYS = (ApiKey(name="alice", hash="sha256:" + "0" * 64),)
ROUTE = ModelRoute(
    model=Model(name="m", source="demo", devices=("core0",), max_concurrent_requests=1),
    status=ModelStatus.READY,
    max_model_len=1000,
    replicas=tuple(replica_route(name) for name in ("r1", "r2", "r3")),
)


class Models:
    """The routes, of one model that keys may ask for."""

    def choose(
        self, fields: dict[str, Any], key: ApiKey | None, preferred: str | None
    ) -> ModelRoute:
        if key is not None and fields["model"] != "m":
            raise Forbidden("not yours")
        return ROUTE


async def answers_unless_it_hangs(request: ModelRequest) -> Answer:
    for _ in range(request.content.fields.get("slow", 0)):
        request.usage.outputs += 1
        await asyncio.sleep(0.25)
    if "hang" in request.content.fields:
        await asyncio.sleep(60)
    request.usage.add_prompt("p", 7, 2)
    request.usage.completion_tokens += 4
    return answered(b"{}")


class Meter:
    """The meter, which writes down."""

    def __init__(self, charged: list[tuple[str, int, int]]) -> None:
        self.charged = charged

    def charge(self, key: ApiKey, prompt: int, completion: int) -> None:
        self.charged.append((key.name, prompt, completion))


def complete(
    body: dict[str, Any],
    owner: str = "alice",
    engine: str | None = "r2",
    keys: Any = KEYS,
    timeout_s: float = 60,
    charged: list[tuple[str, int, int]] | None = None,
    generations: Sequence[int] = (1,),
    tracer: RequestTracer | None = None,
) -> tuple[int, Any, list[ModelRequest]]:
    models: Any = Models()
    engines = FakeEngines(answers_unless_it_hangs)
    server = Server(api_keys=keys, max_body="1KiB")  # type: ignore[arg-type]
    meter: Any = Meter([] if charged is None else charged)
    endpoint = LineEndpoint(
        *(server, LiveKeys(server), meter, models, engines),
        isolates_tenants=True,
        tracer=tracer,
    )
    line = LineRequest(
        generation=0,
        owner=owner,
        path="/v1/completions",
        body=body,
        request_id="q",
        engine=engine,
        timeout_s=timeout_s,
    )
    for generation in generations:
        given = line.model_copy(update={"generation": generation})
        status, answer = asyncio.run(endpoint.complete(given))
    return status, json.loads(answer), engines.asked


def test_a_line_goes_to_the_engine_with_room_as_work_that_may_wait() -> None:
    status, _, (request,) = complete({"model": "m", "prompt": "x"})
    assert status == 200
    assert request.pinned_to == "r2"
    sent = request.content.fields
    assert is_background(sent["vllm_xargs"])
    assert json.loads(request.content.encoded) == sent
    isolated = EngineRequest("/v1/completions", {}).isolated("alice").fields
    assert (sent["cache_salt"], request.request_id) == (isolated["cache_salt"], "q")


def test_a_line_has_a_trace_of_its_own() -> None:
    spans = Spans()
    _, _, (request,) = complete({"model": "m", "prompt": "x"}, tracer=spans.tracer)
    span = spans.one("batch line")
    assert span.parent is None
    assert request.trace is not None
    assert (
        f"{request.trace.id}-{id_of(span):016x}".encode()
        in dict(request.trace.headers)[b"traceparent"]
    )
    assert attributes(span) == {
        "loomserve.request_id": "q",
        "http.route": "/v1/completions",
        "loomserve.key": "alice",
        "loomserve.model": "m",
        "http.response.status_code": 200,
    }
    assert complete({"model": "other", "prompt": "x"}, tracer=spans.tracer)[0] == 403
    assert attributes(spans.all[-1])["http.response.status_code"] == 403


def test_a_line_is_charged_to_its_key_and_one_that_is_refused_is_not() -> None:
    charged: list[tuple[str, int, int]] = []
    complete({"model": "m"}, charged=charged)
    complete({"model": "other"}, charged=charged)
    assert charged == [("alice", 7, 4)]


def test_a_line_of_a_lane_that_another_has_taken_over_from_reaches_no_engine() -> None:
    status, answer, asked = complete({"model": "m"}, generations=(2, 3, 2))
    assert (status, len(asked)) == (503, 2)
    assert outcome(status, json.dumps(answer).encode()) is LineOutcome.AWAY
    status, _, asked = complete({"model": "m"}, generations=(2, 2, 3))
    assert (status, len(asked)) == (200, 3)


def test_without_a_known_engine_any_may_take_it() -> None:
    assert complete({"model": "m"}, engine=None)[2][0].pinned_to is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "other"}, 403),
        ({"model": "m", "stream": True}, 400),
        ({"model": "m", "encoding_format": "bytes"}, 400),
        ({"model": "m", "kv_transfer_params": {}}, 400),
        ({"model": "m", "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}, 400),
        ({"model": "m", "vllm_xargs": {DEADLINE: 1}}, 400),
        ({"model": "m", "prompt": "x" * 2000}, 413),
        ({"model": "m", "prompt": "x" * 20_000}, 400),
        ({"model": "m", "prompt": ["x"] * 64, "n": 3}, 400),
        ({"model": "m", "temperature": float("nan")}, 400),
        ({"model": "m", "structured_outputs": {"json": "[" * 100}}, 400),
        ({"model": "m", "guided_choice": ["red", "green"]}, 400),
        ({"model": "m", "n": "+16"}, 400),
        ({"model": "m", "priority": -1}, 400),
    ],
)
def test_what_a_client_may_not_ask_for_a_line_may_not_either(
    body: dict[str, Any], status: int
) -> None:
    answered, answer, forwarded = complete(body)
    assert (answered, forwarded) == (status, [])
    assert answer["error"]["message"]


def test_a_key_that_is_gone_has_no_lines_computed() -> None:
    assert complete({"model": "m"}, owner="bob")[0] == 403
    assert complete({"model": "m"}, owner="")[0] == 403
    assert complete({"model": "m"}, owner="", keys=())[0] == 200


def test_an_engine_that_gives_a_line_no_further_token_loses_it() -> None:
    status, answer, _ = complete({"model": "m", "slow": 1, "hang": True}, timeout_s=0.5)
    assert (status, answer["error"]["code"]) == (500, "line_timeout")
    assert "batch.line_timeout_s" in answer["error"]["message"]
    assert outcome(status, json.dumps(answer).encode()) is LineOutcome.ENGINE_FAILED


def test_a_line_that_gets_tokens_goes_on_however_slowly() -> None:
    assert complete({"model": "m", "slow": 8}, timeout_s=1)[0] == 200


def test_a_line_that_no_engine_begins_is_tried_again_as_often_as_it_takes() -> None:
    status, answer, _ = complete({"model": "m", "hang": True}, timeout_s=0.05)
    assert (status, answer["error"]["code"]) == (503, "line_not_begun")
    assert outcome(status, json.dumps(answer).encode()) is LineOutcome.AWAY
