"""A platform whose gateway has the front ends: requests go on when their engine is gone."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from loomserve.platform.base.files import replace_private
from tests.e2e.conftest import ENGINE, HOT, Platform, started
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_bad_input import CHAT, HELLO, assert_openai_error
from tests.e2e.test_batch import ended, line, lines_of, submit
from tests.e2e.test_failures import engine_process
from tests.e2e.test_prefill_decode import ask, handoffs, hands_over, new_prompt, set_roles

pytestmark = pytest.mark.e2e

STREAMS = 8
TOKENS = 160
PAUSE = "loomserve_continuation_pause_seconds"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def write_shared(path: Path, port: int, hashes: tuple[str, ...]) -> None:
    config = {
        "devices": [
            {"name": "core0", "kind": "cpu", "cores": [0]},
            {"name": "core1", "kind": "cpu", "cores": [min(1, (os.cpu_count() or 1) - 1)]},
        ],
        "models": [
            {
                "name": HOT,
                "source": "demo",
                "devices": ["core0", "core1"],
                "replicas": 2,
                "kv_cache_memory": "256MiB",
                "engine": {**ENGINE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
            }
        ],
        "kvstore": {"memory": "256MiB"},
        "batch": {"folder": "batch"},
        "server": {
            "port": port,
            "max_body": "1MiB",
            "drain_timeout_s": 20,
            "admin_token_hash": hashes[2],
            "api_keys_file": "keys.yaml",
            "api_keys": [{"name": "all", "hash": hashes[0]}],
            "shared_front_end": True,
        },
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    replace_private(path.parent / "keys.yaml", "api_keys: []")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """In the place of the one that other tests share."""
    with started(tmp_path_factory.mktemp("shared"), write_shared) as running:
        yield running


class Streams:
    """Streams that run at once, each with its text so far."""

    def __init__(self, platform: Platform, count: int = STREAMS) -> None:
        self.texts = [""] * count
        self.usages: list[Any] = [None] * count
        self._platform = platform
        self._pool = ThreadPoolExecutor(count)
        self._running: list[Future[None]] = [
            self._pool.submit(self._run, index) for index in range(count)
        ]
        self.halfway = threading.Event()

    def _run(self, index: int) -> None:
        stream = self._platform.client().completions.create(
            model=HOT,
            prompt=f"Story number {index}. Once upon a time",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for event in stream:
            if event.choices:
                self.texts[index] += event.choices[0].text
            self.usages[index] = event.usage or self.usages[index]

    def until_all_run(self) -> None:
        wait_for(lambda: all(len(text) > 40 for text in self.texts), 60)

    def finish(self) -> list[str]:
        """The whole texts; raises what a stream has ended with."""
        for one in self._running:
            one.result(timeout=180)
        self._pool.shutdown()
        return self.texts


@pytest.fixture(scope="module")
def undisturbed(platform: Platform) -> list[str]:
    return Streams(platform).finish()


def in_flight(platform: Platform) -> dict[str, int]:
    """Requests that each replica's engine has."""
    return {one["id"]: one["in_flight"] for one in model_state(platform, HOT)["replicas"]}


def test_all_endpoints_answer(platform: Platform) -> None:
    client = platform.client()
    said = client.chat.completions.create(
        model=HOT,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    assert "Paris" in said.choices[0].message.content
    assert said.usage.completion_tokens > 0
    completed = client.completions.create(model=HOT, prompt="One, two,", max_tokens=4)
    assert completed.choices[0].text
    responded = client.responses.create(model=HOT, input="Say hello.", max_output_tokens=16)
    assert responded.output_text
    with platform.http() as http:
        message = http.post(
            "/v1/messages", json={"model": HOT, "messages": HELLO, "max_tokens": 4}
        ).raise_for_status()
        assert message.json()["content"][0]["text"]
        tokens = http.post("/v1/tokenize", json={"model": HOT, "prompt": "Hello there"})
        ids = tokens.raise_for_status().json()["tokens"]
        text = http.post("/v1/detokenize", json={"model": HOT, "tokens": ids})
        assert text.raise_for_status().json()["prompt"] == "Hello there"
        embedded = http.post("/v1/embeddings", json={"model": HOT, "input": "Hello"})
        assert_openai_error(embedded, 404, "/v1/embeddings", "/v1/chat/completions")
        assert embedded.json()["error"]["code"] == "endpoint_not_found"


def test_answers_of_several_kinds(platform: Platform) -> None:
    client = platform.client()
    two = client.chat.completions.create(model=HOT, messages=HELLO, max_tokens=4, n=2)
    assert [one.index for one in two.choices] == [0, 1]
    called = client.chat.completions.create(
        model=HOT,
        messages=HELLO,
        max_tokens=64,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    described = client.chat.completions.create(
        model=HOT,
        messages=[{"role": "user", "content": "Describe Paris as JSON with city and big."}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    assert json.loads(described.choices[0].message.content).keys() == {"city", "big"}
    events = list(
        client.chat.completions.create(
            model=HOT,
            messages=HELLO,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert events[-1].usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"messages": "hello"}, "invalid_request"),
        ({"max_tokens": -1}, "invalid_request"),
        ({"max_tokens": 10**9}, None),
        ({"n": 1000}, "invalid_request"),
        ({"logprobs": True, "top_logprobs": 1000}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "context_length_exceeded"),
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_bad_input_is_refused_in_openais_shape(
    platform: Platform, change: dict[str, Any], code: str | None
) -> None:
    with platform.http() as http:
        given = {"model": HOT, "messages": HELLO, "max_tokens": 4} | change
        response = http.post(CHAT, json=given)
        assert_openai_error(response, 400)
        assert code is None or response.json()["error"]["code"] == code
        assert http.post(CHAT, json={**given, "model": "none"}).status_code in (400, 404)


def test_metrics_have_each_replica_once(platform: Platform) -> None:
    with platform.admin() as admin:
        page = admin.get("/metrics").raise_for_status().text
    for replica in model_state(platform, HOT)["replicas"]:
        labels = f'model="{HOT}",replica="{replica["id"]}",device="{replica["device"]}"'
        assert f"loomserve_scrape_up{{{labels}}} 1" in page
        of_vllm = [one for one in page.splitlines() if one.startswith("vllm:num_requests_running{")]
        assert len([one for one in of_vllm if labels in one]) == 1
    assert platform.metric("vllm:generation_tokens_total", model=HOT) > 0
    assert platform.metric("loomserve_time_to_first_token_seconds_count", model=HOT) > 0
    assert platform.metric("loomserve_route_decisions_total", model=HOT) > 0


def test_a_batchs_line_is_answered(platform: Platform) -> None:
    client = platform.client()
    batch = ended(client, submit(client, [line("a"), line("b", max_tokens=-1)]))
    assert lines_of(client, batch.output_file_id)["a"]["response"]["status_code"] == 200
    assert lines_of(client, batch.error_file_id)["b"]["response"]["status_code"] == 400


def test_a_client_that_leaves_has_its_request_aborted(platform: Platform) -> None:
    wait_for(lambda: not sum(in_flight(platform).values()), 10)
    stream = platform.client().completions.create(
        model=HOT, prompt="On", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_for(lambda: sum(in_flight(platform).values()) == 1, 5)
    stream.close()
    wait_for(lambda: not sum(in_flight(platform).values()), 5)
    assert platform.metric("loomserve_client_disconnects_total", model=HOT) >= 1


@pytest.mark.slow
def test_streams_go_on_while_their_replica_is_drained(
    platform: Platform, undisturbed: list[str]
) -> None:
    streams = Streams(platform)
    streams.until_all_run()
    drained = max(in_flight(platform), key=in_flight(platform).__getitem__)
    path = f"/admin/v1/replicas/{drained}/draining"
    began = time.monotonic()
    with platform.admin() as admin:
        admin.put(path, json={"draining": True}).raise_for_status()
        wait_for(lambda: in_flight(platform)[drained] == 0, 8)
        took_s = time.monotonic() - began
        assert streams.texts != undisturbed, "they had ended before"
        assert streams.finish() == undisturbed
        assert in_flight(platform)[drained] == 0
        admin.put(path, json={"draining": False}).raise_for_status()
    assert platform.metric("loomserve_continued_requests_total", reason="drained") >= 1
    print(f"drained in {took_s:.1f} s")
    # It takes requests again.
    wait_for(lambda: Streams(platform).finish() == undisturbed and takes(platform, drained), 60)


def takes(platform: Platform, replica: str) -> bool:
    decided = platform.metric("vllm:request_success_total", model=HOT, replica=replica)
    return decided > 0


def test_streams_go_on_when_their_engine_is_killed(
    platform: Platform, undisturbed: list[str]
) -> None:
    streams = Streams(platform)
    streams.until_all_run()
    victim = max(model_state(platform, HOT)["replicas"], key=lambda one: one["in_flight"])
    engine_process(platform, victim).kill()
    assert streams.finish() == undisturbed
    assert all(usage.completion_tokens == TOKENS for usage in streams.usages)
    assert platform.metric("loomserve_continued_requests_total", reason="gone") >= 1
    pauses = [platform.metric(f"{PAUSE}_{what}", model=HOT) for what in ("sum", "count")]
    print(f"moved requests paused for {pauses[0] / pauses[1]:.2f} s in the mean of {pauses[1]:.0f}")
    wait_for(lambda: victim["id"] not in in_flight(platform), 60)
    wait_for(lambda: model_state(platform, HOT)["status"] == "ready", 240)
    assert Streams(platform).finish() == undisturbed


@pytest.mark.slow
def test_prompts_are_computed_by_prefill_replicas_while_roles_change(platform: Platform) -> None:
    cases: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 40, "temperature": 1.0, "seed": 5},
        {"max_tokens": 40, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    ]
    prompt = new_prompt()

    def texts() -> list[str]:
        return [one(case) for case in cases]

    def one(case: dict[str, Any]) -> str:
        # What the one has computed the other does not find.
        salted = {"cache_salt": uuid.uuid4().hex}
        return str(ask(platform, prompt, extra_body=salted, **case).choices[0].text)

    alone = texts()
    try:
        set_roles(platform, core0="prefill", core1="decode")
        with hands_over(platform, "continued", len(cases)):
            assert texts() == alone
        with hands_over(platform, "local"):
            ask(platform, "Once")
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(one, case) for case in cases * 6]
            set_roles(platform, core0="decode", core1="prefill")
            assert [each.result(120) for each in running] == alone * 6
        assert handoffs(platform, "kv") == 0
    finally:
        set_roles(platform, core0="unified", core1="unified")
