"""Traces of a platform's requests, as a collector gets them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_admin import model_state
from tests.e2e.traced import Traced, events
from tests.unit.platform.tracing.collector import Collector, read

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ask(platform: Platform, path: str, trace: Traced, **fields: Any) -> httpx.Response:
    with platform.http() as http:
        answer = http.post(
            path,
            json={"model": HOT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields},
            headers={**trace.headers, "x-request-id": f"r-{trace.id}"},
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == f"r-{trace.id}"
    assert answer.headers["traceresponse"].startswith(f"00-{trace.id}-")
    return answer


def test_a_trace_goes_from_the_client_over_the_gateway_to_vllm(
    platform: Platform, collector: Collector
) -> None:
    unsampled, first, second = Traced(sampled=False), Traced(), Traced()
    there = {each.trace_id.hex() for each in collector.spans}
    usage = ask(platform, COMPLETIONS, first, prompt="The capital of France is").json()["usage"]
    ask(platform, COMPLETIONS, unsampled, prompt="Not to be told")
    with platform.http() as http:
        body = {"model": HOT, "prompt": "Nor is this", "max_tokens": 2}
        assert http.post(COMPLETIONS, json=body).status_code == 200
    ask(
        *(platform, CHAT, second),
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        n=2,
        stop=["e"],
        temperature=1,
    )

    server, *came = first.spans(collector, f"POST {COMPLETIONS}", "answer", "llm_request")
    found = {each.name: each for each in came}
    told = read(server.attributes)
    replicas = {each["id"] for each in model_state(platform, HOT)["replicas"]}
    assert told == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "loomserve.request_id": f"r-{first.id}",
        "loomserve.key": "all",
        "loomserve.model": HOT,
        "loomserve.stream": False,
        "gen_ai.request.model": HOT,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
    }
    ((name, route),) = events(server)
    assert name == "route"
    assert route["replica"] in replicas
    answer = read(found["answer"].attributes)
    assert (answer["loomserve.replica"], answer["loomserve.tokens"]) == (route["replica"], 6)
    request = read(found["llm_request"].attributes)
    assert request["gen_ai.usage.completion_tokens"] == 6
    assert f"r-{first.id}" in request["gen_ai.request.id"]
    for part in ("queue", "model_prefill", "model_decode"):
        assert request[f"gen_ai.latency.time_in_{part}"] >= 0
    assert request["gen_ai.latency.time_in_model_prefill"] > 0

    # Two answers, which vLLM ends by itself at a stop string.
    server, *_ = second.spans(collector, f"POST {CHAT}", *["answer", "llm_request"] * 2)
    assert sorted(name for name, _ in events(server)) == ["first_token", "route", "route"]
    assert read(server.attributes)["loomserve.stream"] is True

    assert {each.trace_id.hex() for each in collector.spans} - there == {first.id, second.id}
    assert {each["service.name"] for each in collector.resources} == {"loomserve"}
