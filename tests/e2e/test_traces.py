"""Traces of a platform's requests, as a collector gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.conftest import ENGINE, HOT, Platform, server_section, started
from tests.unit.platform.tracing.collector import Collector, grpc_collector, read

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SPAN_ID = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with grpc_collector() as collecting:
        yield collecting


@pytest.fixture(scope="module")
def platform(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One that begins no trace by itself, so that all that comes was asked for."""

    def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        return {
            "devices": [{"name": "core0", "kind": "cpu", "cores": [0]}],
            "models": [
                {
                    "name": HOT,
                    "source": "demo",
                    "devices": ["core0"],
                    "kv_cache_memory": "128MiB",
                    "engine": ENGINE,
                }
            ],
            "server": {
                **server_section(port, hashes),
                "tracing": {"endpoint": collector.url, "sample": 0.0},
            },
        }

    with started(tmp_path_factory.mktemp("platform"), configured) as running:
        yield running


def ask(
    platform: Platform, path: str, trace_id: str, *, sampled: bool = True, **fields: Any
) -> httpx.Response:
    given = f"00-{trace_id}-{SPAN_ID}-{int(sampled):02x}"
    with platform.http() as http:
        answer = http.post(
            path,
            json={"model": HOT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields},
            headers={"traceparent": given, "x-request-id": f"r-{trace_id}"},
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == f"r-{trace_id}"
    assert answer.headers["traceresponse"].startswith(f"00-{trace_id}-")
    return answer


def names(span: Span) -> list[str]:
    return [each.name for each in span.events]


def test_a_trace_goes_from_the_client_over_the_gateway_to_vllm(
    platform: Platform, collector: Collector
) -> None:
    unsampled, first, second = "a" * 32, "b" * 32, "c" * 32
    usage = ask(platform, COMPLETIONS, first, prompt="The capital of France is").json()["usage"]
    ask(platform, COMPLETIONS, unsampled, sampled=False, prompt="Not to be told")
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

    came = collector.wait_for(first, f"POST {COMPLETIONS}", "answer", "llm_request")
    found = {each.name: each for each in came}
    server = found.pop(f"POST {COMPLETIONS}")
    assert server.parent_span_id.hex() == SPAN_ID
    for each in found.values():
        assert each.parent_span_id == server.span_id, each.name
        assert server.start_time_unix_nano <= each.start_time_unix_nano
        assert each.end_time_unix_nano <= server.end_time_unix_nano
    told = read(server.attributes)
    replica = platform.state()["models"][0]["replicas"][0]["id"]
    assert told == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "loomserve.request_id": f"r-{first}",
        "loomserve.key": "all",
        "loomserve.model": HOT,
        "loomserve.stream": False,
        "gen_ai.request.model": HOT,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
    }
    assert names(server) == ["route"]
    assert read(server.events[0].attributes)["loomserve.replica"] == replica
    answer = read(found["answer"].attributes)
    assert (answer["loomserve.replica"], answer["loomserve.tokens"]) == (replica, 6)
    request = read(found["llm_request"].attributes)
    assert request["gen_ai.usage.completion_tokens"] == 6
    assert f"r-{first}" in request["gen_ai.request.id"]
    for part in ("queue", "model_prefill", "model_decode"):
        assert request[f"gen_ai.latency.time_in_{part}"] >= 0
    assert request["gen_ai.latency.time_in_model_prefill"] > 0

    # Two answers, which vLLM ends by itself at a stop string.
    server, *parts = collector.wait_for(second, f"POST {CHAT}", *["answer", "llm_request"] * 2)
    assert [each.parent_span_id for each in parts] == [server.span_id] * 4
    assert sorted(names(server)) == ["first_token", "route", "route"]
    assert read(server.attributes)["loomserve.stream"] is True

    assert {each.trace_id.hex() for each in collector.spans} == {first, second}
    assert {each["service.name"] for each in collector.resources} == {"loomserve"}
