"""Streams of a model go on, the same tokens, when the engine that computes them is lost.

Two engines' processes of one model, and vLLM's own server of it in this process. The tests stand in
the order in which they use the engines up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.engine.serving import ModelServing
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from loomserve.platform.front_end.routing import RoutingContext, RoutingRequest, routing_context
from loomserve.platform.models import catalog
from tests.integration.served_engine import ServedEngine, engine_start, environment
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.slow]

T = TypeVar("T")

TOKENS = 48
BOUNDS = ContinuationBounds(silence_s=3.0, reroute_timeout_s=4.0, begun_timeout_s=6.0)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 384 * 2**20,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a person",
        "parameters": SCHEMA,
    },
}
# As the model's family writes it, so that its parser has to follow from token to token.
CALL = (
    r'<tool_call>\n\{"name": "find", "arguments": '
    r'\{"name": "[A-Z][a-z]{3,8}", "age": [1-9][0-9], "tags": \["[a-z]{3,6}"\]\}\}\n</tool_call>'
)


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def as_json(strict: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": strict}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": chat("Tell me a story about a fox."),
    "greedy too": chat("What is a ship made of?"),
    # vLLM leaves out the log probability of a token without text, such as an end that is ignored,
    # if it comes in an event of its own.
    "logprobs": chat("Tell me a story about a red ship.", logprobs=True, top_logprobs=3),
    "penalties": chat(
        "Count to ten, again and again.",
        frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, ignore_eos=True,
    ),
    "seeded": chat("Invent a name.", temperature=0.9, seed=7, ignore_eos=True),
    "seeded, penalties": chat(
        "Invent a place.", temperature=1.0, seed=8, frequency_penalty=0.8, ignore_eos=True
    ),
    "two answers": chat("Invent a word.", temperature=0.9, seed=9, n=2, ignore_eos=True),
    "schema": chat("Describe Ada as JSON.", response_format=as_json(SCHEMA)),
    "schema, seeded": chat(
        "Describe Bob as JSON.", response_format=as_json(SCHEMA), temperature=0.8, seed=3
    ),
    "tool": chat(
        "Find Ada, who is 36.",
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "find"}},
    ),
    "tool of its own accord": chat(
        "Find Bob, who is 42.", tools=[TOOL], structured_outputs={"regex": CALL}, max_tokens=64
    ),
    "stop": chat("Write of the sea.", min_tokens=30, stop=["."], max_tokens=80),
    "logit bias": chat("Say something.", logit_bias={"260": 5.0, "28": -100}, ignore_eos=True),
    "completion": (
        "/v1/completions",
        {
            "model": "demo", "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0,
            "logprobs": 2, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    "response": (
        "/v1/responses",
        {
            "model": "demo", "input": "Tell me of the moon.", "max_output_tokens": TOKENS,
            "temperature": 0, "stream": True, "store": False,
        },
    ),
}  # fmt: skip


@dataclass(eq=False)
class Streamed(RoutingContext):
    """What came of one request, and when."""

    status: int = 0
    body: bytes = b""
    came_at: list[float] = field(default_factory=list)
    home: str = "a"
    """The replica that it is sent to."""

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [each[6:] for each in self.body.decode().split("\n") if each.startswith("data: ")]
        return [json.loads(each) for each in lines if each != "[DONE]"]

    def said(self) -> dict[str, Any]:
        """All of it that does not depend on when and under which id it was asked for."""
        assert self.status == 200, self.body
        said: dict[str, Any] = {"errors": [each for each in self.events if "error" in each]}
        choices: dict[int, dict[str, Any]] = {}
        for event in self.events:
            said["usage"] = event.get("usage") or said.get("usage")
            if event.get("type") == "response.output_text.delta":
                said["text"] = said.get("text", "") + event["delta"]
            if event.get("type") in ("response.completed", "response.incomplete"):
                said["usage"] = event["response"]["usage"]
                said["status"] = event["response"]["status"]
            for choice in event.get("choices", ()):
                one = choices.setdefault(choice["index"], {"text": "", "logprobs": {}, "end": None})
                delta = choice.get("delta", {})
                one["text"] += delta.get("content") or choice.get("text") or ""
                for call in delta.get("tool_calls") or ():
                    one["text"] += call["function"].get("arguments") or ""
                told = choice.get("logprobs") or {}
                # Which tokens come in one event is a matter of time, and with it their offsets.
                for name in told.keys() - {"text_offset"}:
                    one["logprobs"].setdefault(name, []).extend(told[name] or ())
                one["end"] = choice.get("finish_reason") or one["end"]
        # How much of the prompt was in an engine's cache is the engine's matter.
        usage = said["usage"] or {}
        usage = {key: usage[key] for key in usage if not key.endswith("_details")}
        return said | {"choices": choices, "usage": usage}


def same(one: Any, other: Any) -> None:
    """See that two runs said the same; log probabilities as exactly as float32 has them.

    In which batch a token is computed shows in their last digits, without any disturbance.
    """
    exact_one, values_one = split(one)
    exact_other, values_other = split(other)
    for kind in exact_one:
        assert exact_one[kind] == exact_other[kind], kind
    apart = max(abs(a - b) for a, b in zip(values_one, values_other, strict=True))
    print(f"\n{len(values_one)} log probabilities, at most {apart:.1e} apart")
    assert apart < 1e-4


def split(said: Any) -> tuple[Any, list[float]]:
    """What was said with each number that is not whole left out, and these numbers."""
    numbers: list[float] = []

    def left(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: left(each) for key, each in value.items()}
        if isinstance(value, list):
            return [left(each) for each in value]
        if isinstance(value, float):
            numbers.append(value)
            return "a number"
        return value

    return left(said), numbers


async def ask(app: Any, path: str, body: dict[str, Any]) -> Streamed:
    streamed = Streamed()
    await into(streamed, app, path, body)
    return streamed


async def into(streamed: Streamed, app: Any, path: str, body: dict[str, Any]) -> None:
    """Ask, as an ASGI server does, and gather what is sent."""
    encoded = json.dumps(body).encode()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.get_running_loop().create_future()
        asked = True
        return {"type": "http.request", "body": encoded, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            streamed.status = message["status"]
        elif message["type"] == "http.response.body" and message.get("body"):
            streamed.body += message["body"]
            streamed.came_at.append(time.monotonic())

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    token = routing_context.set(streamed)
    try:
        await app(scope, receive, send)
    finally:
        routing_context.reset(token)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of whatever the test looks at
            await asyncio.sleep(0.01)


class Front:
    """The front end under test, with a router that sends each stream to its home if it can."""

    def __init__(self, name: str = "demo") -> None:
        self.registry = CollectorRegistry()
        self.serving: ModelServing
        self.name = name

    def choose(self, routing: RoutingRequest) -> str | None:
        home: str = routing.context.home
        return home if home in routing.candidates else min(routing.candidates)

    async def start(self, options: dict[str, Any], engines: dict[str, ServedEngine]) -> None:
        metrics = ContinuationMetrics(self.registry).of(self.name)
        client = ReplicaSetClient(self.name, self.choose, metrics, bounds=BOUNDS)
        self.serving = ModelServing(self.name, options, client)
        await self.serving.start()
        self.serving.client.set_replicas({key: each.address for key, each in engines.items()})

    def count(self, metric: str, **labels: str) -> float:
        labels["model"] = self.name
        return self.registry.get_sample_value(f"loomserve_{metric}", labels) or 0.0

    def of_vllm(self, metric: str) -> float:
        """A figure of vLLM's, of all replicas together."""
        known = self.serving.llm.statistics._loggers
        return sum(
            sample.value
            for each in known.values()
            for family in each.registry.collect()
            for sample in family.samples
            if sample.name == f"vllm:{metric}"
        )


class Stage:
    """A loop that lives as long as the engines, and what runs on it."""

    def __init__(self, engines: dict[str, ServedEngine], options: dict[str, Any]) -> None:
        self.runner = asyncio.Runner()
        self.engines = engines
        self.options = options
        self.front = Front()
        self.run(self.front.start(options, engines))
        self.undisturbed: dict[str, dict[str, Any]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(240):
                return await work

        return self.runner.run(bounded())

    def streams(self, lost: str = "", disturb: Callable[[], Any] | None = None) -> Played:
        """All kinds at once; ``disturb`` is awaited once those of a replica are under way."""
        return self.run(self._streams(lost, disturb))

    async def _streams(self, lost: str, disturb: Callable[[], Any] | None) -> Played:
        homes = itertools.cycle("ab")
        played = Played({kind: Streamed(home=next(homes)) for kind in KINDS}, lost)
        tasks = {
            kind: asyncio.create_task(into(each, self.front.serving.app, *KINDS[kind]))
            for kind, each in played.streams.items()
        }
        if disturb is not None:
            theirs = [tasks[kind] for kind, each in played.streams.items() if each.home == lost]
            await until(
                lambda: self.under_way(lost) >= len(theirs) or any(each.done() for each in theirs)
            )
            played.disturbed = self.under_way(lost)
            played.disturbed_at = time.monotonic()
            await disturb()
        await asyncio.gather(*tasks.values())
        return played

    def under_way(self, replica: str) -> int:
        """Requests on a replica that have got some tokens, and not their last."""
        opened = self.front.serving.llm.engine_core.requests.open.values()
        return sum(one.replica_id == replica and len(one.tokens) >= 4 for one in opened)


@dataclass
class Played:
    streams: dict[str, Streamed]
    lost: str
    """The replica that is disturbed."""
    disturbed: int = 0
    """Requests that it had under way then."""
    disturbed_at: float = 0.0

    def said(self) -> dict[str, dict[str, Any]]:
        return {kind: each.said() for kind, each in self.streams.items()}

    def pauses(self) -> list[float]:
        """Seconds without a token, of the streams that the replica had."""
        gaps = []
        for each in self.streams.values():
            before = [at for at in each.came_at if at <= self.disturbed_at]
            after = [at for at in each.came_at if at > self.disturbed_at]
            if each.home == self.lost and before and after:
                spans = zip([before[-1], *after], after, strict=False)
                gaps.append(max(later - sooner for sooner, later in spans))
        return gaps


def shown(what: str, played: Played) -> None:
    ordered = sorted(played.pauses())
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(
        f"\n{what}: {played.disturbed} requests moved; {len(ordered)} streams paused, "
        f"p50 {statistics.median(ordered):.3f} s, p99 {p99:.3f} s"
    )


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        # pytest's own folders are too deep for sockets.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-")))
        model = str(catalog.resolve("demo", folder))
        engines = {}
        for core, name in enumerate("ab"):
            start = engine_start(model, folder, **OPTIONS)
            engines[name] = ServedEngine(start, environment(core))
            stack.callback(engines[name].end)
        os.environ.update(environment())
        options = {
            **start.options, "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
        }  # fmt: skip
        del options["served_model_name"]
        made = Stage(engines, options)
        yield made
        made.run(made.front.serving.close())
        made.runner.close()


def test_undisturbed(stage: Stage) -> None:
    stage.undisturbed = stage.streams().said()
    for kind, said in stage.undisturbed.items():
        assert not said["errors"], kind
        assert said["usage"]["total_tokens"] > 20, kind
    for kind in ("tool", "tool of its own accord"):
        (choice,) = stage.undisturbed[kind]["choices"].values()
        if choice["end"] == "tool_calls":
            assert json.loads(choice["text"]).keys() == SCHEMA["properties"].keys(), kind
    assert choice["end"] == "tool_calls"
    # Else the test could not tell what a disturbance does.
    same(stage.streams().said(), stage.undisturbed)
    assert stage.front.count("continued_requests_total", reason="gone") == 0


def test_a_page_of_metrics_for_each_replica_and_model(stage: Stage) -> None:
    """Several models of one process have each their own, whichever came last."""
    other = Front("other")

    async def play() -> None:
        await other.start(stage.options, stage.engines)
        path, body = KINDS["greedy"]
        answered = await ask(other.serving.app, path, {**body, "model": "other"})
        assert answered.said()["choices"] == stage.undisturbed["greedy"]["choices"]

    stage.run(play())
    for front, requests in ((stage.front, 2 * (len(KINDS) + 1)), (other, 1)):
        assert front.of_vllm("request_success_total") == requests
        for replica in "ab":
            page = front.serving.page(replica)
            assert page is not None
            families = {each.name: each for each in text_string_to_metric_families(page)}
            (sample,) = families["vllm:num_requests_running"].samples
            assert sample.labels["model_name"] == front.name
            assert families["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"] != "None"
    stage.run(other.serving.close())


def gap(streamed: Streamed, since: float) -> float:
    """The longest time without a token, of those that came after a moment."""
    times = [at for at in streamed.came_at if at > since]
    return max(later - sooner for sooner, later in itertools.pairwise(times))


def test_an_engine_has_some_of_its_streams_go_on_elsewhere(stage: Stage) -> None:
    front, engine = stage.front, stage.engines["a"]
    asked = [
        chat(f"Tell me a story about {it}.", max_tokens=160, ignore_eos=True, **how)
        for it in ("a fox", "a ship", "the moon", "a long and winding road in the north")
        for how in ({}, {"temperature": 0.9, "seed": 5})
    ]

    async def play(*, moves: bool) -> tuple[list[Streamed], list[Streamed], float]:
        streams, at = [Streamed(home="a") for _ in asked], time.monotonic()
        moved: list[Streamed] = []
        answering = [
            asyncio.create_task(into(each, front.serving.app, *what))
            for each, what in zip(streams, asked, strict=True)
        ]
        await until(lambda: stage.under_way("a") == len(asked))
        if moves:
            at = time.monotonic()
            call = engine.host.move_requests("b", 4, timeout_s=PATIENCE_S)
            assert await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(call, engine.loop)
            ) == 4  # fmt: skip
            opened = front.serving.llm.engine_core.requests.open.values()
            moved = [each.context for each in opened if each.replica_id == "b"]
            assert len(opened) == len(asked)
        await asyncio.gather(*answering)
        return streams, moved, at

    undisturbed, *_ = stage.run(play(moves=False))
    assert front.count("continued_requests_total", reason="moved") == 0
    streams, moved, at = stage.run(play(moves=True))
    for one, other in zip(streams, undisturbed, strict=True):
        assert one.said()["usage"]["completion_tokens"] == 160
        assert one.said() == other.said()
    assert len(moved) == front.count("continued_requests_total", reason="moved") == 4
    stayed = [each for each in streams if each not in moved]
    for what, some in (("moved", moved), ("stayed", stayed)):
        gaps = [gap(each, at) for each in some]
        print(
            f"\n{what}: {len(gaps)} streams, longest time between two tokens "
            f"p50 {statistics.median(gaps):.3f} s, max {max(gaps):.3f} s"
        )


def test_a_drained_engine_is_left_without_a_word_to_clients(stage: Stage) -> None:
    front = stage.front

    async def drain() -> None:
        assert await front.serving.client.drain("a", timeout_s=10) == 0
        assert not front.serving.client.replicas["a"].open

    played = stage.streams("a", drain)
    same(played.said(), stage.undisturbed)
    assert front.count("continued_requests_total", reason="drained") >= played.disturbed
    assert played.disturbed >= 5
    shown("drained", played)
    # It is wanted again.
    addresses = {name: each.address for name, each in stage.engines.items()}

    async def back() -> None:
        front.serving.client.set_replicas({"b": addresses["b"]})
        front.serving.client.set_replicas(addresses)
        await until(lambda: set(front.serving.replicas) == {"a", "b"})

    stage.run(back())


def test_a_stopped_engine_is_left_and_used_again(stage: Stage) -> None:
    engine = stage.engines["b"].host

    async def stop() -> None:
        os.kill(engine.pid, signal.SIGSTOP)

    try:
        played = stage.streams("b", stop)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    same(played.said(), stage.undisturbed)
    assert stage.front.count("continued_requests_total", reason="silent") >= played.disturbed
    assert played.disturbed >= 5
    shown("stopped", played)

    async def idle() -> None:
        async with asyncio.timeout(10):
            while True:
                stats = await asyncio.wrap_future(
                    asyncio.run_coroutine_threadsafe(
                        engine.stats(timeout_s=5), stage.engines["b"].loop
                    )
                )
                if stats.running + stats.waiting == 0 and set(stage.front.serving.replicas) == {
                    "a", "b",
                }:  # fmt: skip
                    return
                await asyncio.sleep(0.1)

    stage.run(idle())
    same(stage.streams().said(), stage.undisturbed)


def test_a_killed_engines_streams_go_on_elsewhere(stage: Stage) -> None:
    front = stage.front
    figures = (
        "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "time_to_first_token_seconds_count", "request_prompt_tokens_count",
        "prompt_tokens_by_source_total",
    )  # fmt: skip
    before = [front.of_vllm(each) for each in figures]
    stage.streams()
    middle = [front.of_vllm(each) for each in figures]

    async def kill() -> None:
        os.kill(stage.engines["a"].host.pid, signal.SIGKILL)

    played = stage.streams("a", kill)
    same(played.said(), stage.undisturbed)
    assert front.count("continued_requests_total", reason="gone") >= played.disturbed
    assert played.disturbed >= 5
    shown("killed", played)
    after = [front.of_vllm(each) for each in figures]
    counted = [second - first for first, second in zip(before, middle, strict=True)]
    again = [second - first for first, second in zip(middle, after, strict=True)]
    assert dict(zip(figures, again, strict=True)) == dict(zip(figures, counted, strict=True))


def test_without_another_replica_a_stream_waits_and_ends_with_an_error(stage: Stage) -> None:
    front = stage.front

    async def play() -> tuple[Streamed, Streamed, float]:
        path, body = KINDS["greedy"]
        streamed = Streamed()
        task = asyncio.create_task(into(streamed, front.serving.app, path, body))
        await until(lambda: len(streamed.came_at) >= 4)
        os.kill(stage.engines["b"].host.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await task
        waited = time.monotonic() - killed_at
        whole = await ask(
            front.serving.app, path, {**body, "stream": False, "stream_options": None}
        )
        return streamed, whole, waited

    streamed, whole, waited = stage.run(play())
    assert BOUNDS.begun_timeout_s - 1 < waited < BOUNDS.begun_timeout_s + PATIENCE_S
    (error,) = streamed.said()["errors"]
    assert error["error"]["code"] == 503
    assert "no replica" in error["error"]["message"]
    assert whole.status == 503
    assert not front.serving.failed
    assert front.count("uncontinued_requests_total", reason="no_replica") == 2
