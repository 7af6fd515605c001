"""The load generator: streams are read, requests sent, windows measured."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import NotMeasuredError
from benchmarks.load import (
    EventStream,
    Outcome,
    Request,
    Target,
    Window,
    arrivals,
    closed_loop,
    prompts,
    send_in_streams,
    send_when_due,
    tokens_within,
)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}}])


USAGE = event(choices=[], usage={"prompt_tokens": 50, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
STREAM = delta("") + delta("data: one") + delta('"usage"\n') + delta("two") + USAGE + DONE


def read(chunks: list[bytes], **how: bool) -> EventStream:
    stream = EventStream(**how)
    for now, chunk in enumerate(chunks):
        stream.feed(chunk, float(now))
    return stream


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_reads_the_same_wherever_its_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    stream = read([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    outcome = stream.outcome(0.0, 3)
    assert outcome.error is None
    assert (outcome.events, outcome.prompt_tokens, outcome.output_tokens) == (6, 50, 3)


def test_a_chunk_with_the_role_alone_is_not_the_first_token() -> None:
    stream = read([delta(""), delta(""), delta("x"), USAGE + DONE])
    assert (stream.first, stream.times[-1]) == (2.0, 3.0)


def test_spaces_in_the_json_do_not_matter_to_the_first_token() -> None:
    assert read([b'data: {"delta":{"content":"x"}}\n\n']).first == 0.0


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([delta("x"), USAGE], "before [DONE]"),
        ([delta("x"), DONE], "0 tokens came, 3 were asked for"),
        ([delta(""), USAGE, DONE], "no text"),
        ([delta("x"), event(error={"message": "engine gone"}), DONE], "engine gone"),
    ],
)
def test_a_broken_stream_is_an_error(chunks: list[bytes], error: str) -> None:
    outcome = read(chunks).outcome(0.0, 3)
    assert outcome.error is not None
    assert error in outcome.error


def test_a_completions_times_are_those_of_its_tokens_alone() -> None:
    chunks = [delta("x"), delta(""), delta("y"), USAGE + DONE]
    found = read(chunks, completion=True).outcome(-0.5, 3)
    assert found.times == (0.0, 1.0, 2.0)
    assert (found.ttft, found.tpot, found.gaps) == (0.5, 1.0, [1.0, 1.0])


def test_a_chunk_with_several_tokens_counts_as_often() -> None:
    said = [event(choices=[{"text": "x", "token_ids": ids}]) for ids in ([7], [8, 9])]
    found = read([*said, USAGE + DONE], ids=True, completion=True).outcome(0.0, 3)
    assert (found.ids, found.times) == ((7, 8, 9), (0.0, 1.0, 1.0))
    assert found.error is None


def test_prompts_repeat_for_a_seed_and_differ_from_their_first_word_on() -> None:
    first = list(itertools.islice(prompts("a"), 200))
    assert first == list(itertools.islice(prompts("a"), 200))
    heads = [prompt.split()[0] for prompt in [*first, *itertools.islice(prompts("b"), 200)]]
    assert len(set(heads)) == len(heads)


def test_arrivals_keep_to_their_rate_and_duration() -> None:
    times = arrivals("a", rate=20.0, duration=100.0)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 100.0
    # Five standard deviations of a Poisson count of mean 2000.
    assert abs(len(times) - 2000) < 5 * 2000**0.5


def test_a_request_asks_for_exactly_so_many_tokens_and_their_usage() -> None:
    asked = json.loads(Request.chat("m", [], 64).data())
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (64, True, 0)
    assert asked["stream_options"] == {"include_usage": True}
    assert json.loads(Request.completion("m", [1], 2, ids=True).data())["return_token_ids"]


@pytest.mark.parametrize(
    ("due", "last", "tokens"),
    [(0.0, 4.0, 0.0), (4.0, 6.0, 5.0), (5.0, 9.0, 10.0), (0.0, 20.0, 2.5), (9.0, 11.0, 5.0)],
)
def test_tokens_count_by_the_share_of_their_request_in_the_window(
    due: float, last: float, tokens: float
) -> None:
    one = Outcome(due, first=last - 0.1, last=last, output_tokens=10)
    assert tokens_within([one], start=5.0, end=10.0) == pytest.approx(tokens)


@given(start=st.floats(1.0, 3.0), length=st.floats(0.5, 6.0), ttft=st.floats(0.01, 0.9))
def test_a_steady_stream_has_one_throughput_wherever_the_window_lies(
    start: float, length: float, ttft: float
) -> None:
    steady = [Outcome(float(n), n + ttft, n + 1.0, output_tokens=64) for n in range(10)]
    seen = Window(start, start + length, tuple(steady))
    assert seen.tokens_per_second() == pytest.approx(64)


def outcome(due: float, last: float, error: str | None = None) -> Outcome:
    return Outcome(due, due + 0.5, last, 50, 11, 22, error)


def test_a_window_reports_what_ended_in_it_and_not_what_failed() -> None:
    outcomes = (outcome(8.0, 12.0), outcome(13.0, 14.5), outcome(19.0, 30.0))
    failed = outcome(13.0, 15.0, "HTTP 500")
    seen = Window(10.0, 20.0, (*outcomes, failed))
    assert seen.errors == ["HTTP 500"]
    found = seen.figures()
    assert (found["requests"], found["ttft_ms_p50"]) == (2, 500.0)
    assert found["tpot_ms_p50"] == pytest.approx(225.0)
    assert found["tokens_per_event"] == 0.5


def test_a_window_without_a_request_is_refused() -> None:
    with pytest.raises(NotMeasuredError, match="--seconds"):
        Window(10.0, 20.0, (outcome(1.0, 2.0),)).figures()


async def three_tokens(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in (delta(""), delta("x"), delta("y"), USAGE + DONE):
        await response.write(part)
        await asyncio.sleep(0.005)
    return response


async def refusal(_: web.Request) -> web.Response:
    return web.Response(status=503, text="no replica")


async def with_server(
    handler: Handler, loading: Callable[[Target], Coroutine[None, None, Any]]
) -> Any:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server:
        return await loading(Target(str(server.make_url("")).rstrip("/"), "m"))


def test_a_closed_loop_keeps_its_streams_busy_for_the_whole_window() -> None:
    load = partial(closed_loop, streams=4, warmup=0.1, seconds=0.5, max_tokens=3, seed="a")
    seen = asyncio.run(with_server(three_tokens, load))
    assert seen.errors == []
    # Longer where it takes longer until each stream has ended a request.
    assert seen.end - seen.start >= 0.499
    assert len(seen.ended_within()) >= 4
    assert min(one.due for one in seen.good) < seen.start
    # A stall of the loop across the end may keep every stream from starting another request.
    assert max(one.last for one in seen.good) >= (seen.start + seen.end) / 2
    assert seen.tokens_per_second() > 0


def test_a_window_stays_open_until_each_stream_has_ended_a_request() -> None:
    load = partial(closed_loop, streams=2, warmup=0, seconds=0.001, max_tokens=3, seed="a")
    seen = asyncio.run(with_server(three_tokens, load))
    assert len(seen.ended_within()) == 2


def test_streams_are_divided_evenly_over_the_targets() -> None:
    seen: list[str] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["model"])
        return await three_tokens(request)

    def load(to: Target) -> Coroutine[None, None, Window]:
        both = (to, Target(to.url, "other"))
        return closed_loop(*both, streams=4, warmup=0, seconds=0.001, max_tokens=3, seed="a")

    assert asyncio.run(with_server(noted, load)).errors == []
    assert sorted(seen[:4]) == ["m", "m", "other", "other"]


def asked(count: int) -> list[Request]:
    return [Request.chat("m", [], 3, at_s=0.02 * number) for number in range(count)]


def test_requests_are_sent_when_they_are_due_whatever_becomes_of_others() -> None:
    outcomes = asyncio.run(
        with_server(three_tokens, lambda to: send_when_due([to.url, to.url], asked(5)))
    )
    assert [one.error for one in outcomes] == [None] * 5
    assert outcomes[4].due - outcomes[0].due == pytest.approx(0.08)


def test_streams_share_requests_and_their_outcomes_keep_the_order() -> None:
    requests = [Request.chat("m", [], 3 + number % 2) for number in range(5)]
    load = partial(send_in_streams, requests=requests, streams=2)
    outcomes = asyncio.run(with_server(three_tokens, lambda to: load([to.url])))
    assert [one.error is None for one in outcomes] == [True, False, True, False, True]


def test_how_soon_an_answer_is_wanted_is_told_from_when_it_is_due() -> None:
    told = []

    async def note(request: web.Request) -> web.Response:
        told.append(int(request.headers["x-slo-ms"]))
        return web.Response(status=429, text="deadline_unreachable")

    late = Request.chat("m", [], 3, slo_s=5.0)
    (found,) = asyncio.run(with_server(note, lambda to: send_when_due([to.url], [late])))
    assert 4000 < told[0] <= 5000
    assert found.error == "HTTP 429: deadline_unreachable"


def test_a_server_that_refuses_ends_the_load_with_errors() -> None:
    load = partial(closed_loop, streams=4, warmup=0, seconds=60, max_tokens=3, seed="a")
    seen = asyncio.run(with_server(refusal, load))
    assert set(seen.errors) == {"HTTP 503: no replica"}
