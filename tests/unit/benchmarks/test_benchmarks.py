"""The pure parts of the benchmarks: reading streams, windows, paired figures, configurations."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import disaggregation
from benchmarks.disaggregation import Answer, Slo, answer, continued
from benchmarks.load import (
    EventStream,
    Outcome,
    Target,
    Window,
    arrivals,
    body,
    closed_loop,
    open_loop,
    prompts,
    tokens_within,
)
from benchmarks.overhead import RequestsFailedError, arguments, in_turn
from benchmarks.report import (
    Sample,
    WindowTooShortError,
    absolute,
    comparison,
    sample,
    throughput_ratio,
    ttft_added_ms,
)
from benchmarks.servers import EngineFlags, loomserve_config
from benchmarks.workload import PrefixRequest
from loomserve.platform import config


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}}])


USAGE = event(choices=[], usage={"prompt_tokens": 50, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
STREAM = delta("") + delta("data: one") + delta('"usage"\n') + delta("two") + USAGE + DONE


def read(chunks: list[bytes]) -> EventStream:
    stream = EventStream()
    for now, chunk in enumerate(chunks):
        stream.feed(chunk, float(now))
    return stream


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_reads_the_same_wherever_its_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    stream = read([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    outcome = stream.outcome(due=0.0, expected_tokens=3)
    assert outcome.error is None
    assert (outcome.events, outcome.prompt_tokens, outcome.output_tokens) == (6, 50, 3)


def test_a_chunk_with_the_role_alone_is_not_the_first_token() -> None:
    stream = read([delta(""), delta(""), delta("x"), USAGE + DONE])
    assert (stream.first, stream.last) == (2.0, 3.0)


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
    outcome = read(chunks).outcome(due=0.0, expected_tokens=3)
    assert outcome.error is not None
    assert error in outcome.error


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
    asked = json.loads(body("m", "hello", 64))
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (64, True, 0)
    assert asked["stream_options"] == {"include_usage": True}


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


def window(*outcomes: Outcome) -> Window:
    return Window(10.0, 20.0, outcomes)


def outcome(due: float, last: float, error: str | None = None) -> Outcome:
    return Outcome(due, due + 0.5, last, 50, 11, 22, error)


def test_a_closed_loop_reports_what_ended_in_the_window_and_an_open_one_what_was_due() -> None:
    both = window(outcome(8.0, 12.0), outcome(13.0, 14.5), outcome(19.0, 30.0))
    closed, opened = sample(both, closed=True), sample(both, closed=False)
    assert closed.tpot_ms == pytest.approx((350.0, 100.0))
    assert opened.tpot_ms == pytest.approx((100.0, 1050.0))
    assert closed.ttft_ms == pytest.approx((500.0, 500.0))
    assert closed.tokens_per_event == 0.5


def test_errors_are_told_and_not_measured() -> None:
    mixed = window(outcome(12.0, 14.0), outcome(13.0, 15.0, "HTTP 500"))
    assert mixed.errors == ["HTTP 500"]
    assert len(sample(mixed, closed=True).ttft_ms) == 1


def test_a_window_without_a_request_is_refused() -> None:
    with pytest.raises(WindowTooShortError, match="--seconds"):
        sample(window(outcome(1.0, 2.0)), closed=True)


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
    handler: Handler, loading: Callable[[Target], Coroutine[None, None, Window]]
) -> Window:
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


def test_an_open_loop_sends_its_whole_schedule() -> None:
    load = partial(open_loop, rate=40, warmup=0.1, seconds=0.5, max_tokens=3, seed="a")
    seen = asyncio.run(with_server(three_tokens, load))
    assert seen.errors == []
    assert len(seen.good) == len(arrivals("a", 40, 0.6))


def test_a_server_that_refuses_ends_the_load_with_errors() -> None:
    load = partial(closed_loop, streams=4, warmup=0, seconds=60, max_tokens=3, seed="a")
    seen = asyncio.run(with_server(refusal, load))
    assert set(seen.errors) == {"HTTP 503: no replica"}


def figures(throughput: float, ttft: float) -> Sample:
    return Sample(throughput, (ttft, ttft, ttft + 100), (20.0, 30.0), 70.0, 1.0)


PAIRS = [
    (figures(100.0, 30.0), figures(90.0, 35.0)),
    (figures(50.0, 60.0), figures(50.0, 62.0)),
    (figures(200.0, 15.0), figures(190.0, 19.0)),
]


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    ratio = throughput_ratio(PAIRS)
    assert (ratio.median, ratio.min, ratio.max) == pytest.approx((0.95, 0.9, 1.0))


def test_added_latency_is_the_median_of_each_pairs_difference() -> None:
    added = ttft_added_ms(PAIRS)
    assert (added.median, added.min, added.max) == pytest.approx((4.0, 2.0, 5.0))


def test_percentiles_are_over_the_requests_of_all_runs() -> None:
    own = absolute([base for base, _ in PAIRS])
    assert own["requests"] == 9
    assert own["ttft_ms_p50"] == 60.0
    assert own["tokens_per_second"] == 100.0


def test_the_result_has_the_agreed_keys() -> None:
    result = comparison(dict.fromkeys(("first", "1", "8", "32", "open"), PAIRS))
    ratios = {"throughput_ratio_1", "throughput_ratio_8", "throughput_ratio_32"}
    assert result.keys() == ratios | {"ttft_added_ms_p50", "runs", "spread", "by_load"}
    assert result["spread"].keys() == ratios | {"ttft_added_ms_p50"}
    assert result["runs"] == 3


def test_the_result_has_only_the_loads_that_were_asked_for() -> None:
    result = comparison({"8": PAIRS})
    assert result.keys() == {"throughput_ratio_8", "runs", "spread", "by_load"}
    assert result["runs"] == 3


def test_loads_are_chosen_each_once() -> None:
    assert arguments(["--loads", "8,open"]).loads == ("8", "open")
    for wrong in ("9", "8,8", ""):
        with pytest.raises(SystemExit):
            arguments(["--loads", wrong])


def test_arms_take_turns_at_going_first() -> None:
    assert [in_turn(run) for run in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]


def test_both_arms_get_the_same_engine() -> None:
    flags = EngineFlags(dtype="float32")
    served = config.parse(yaml.safe_dump(loomserve_config("/models/m", flags, 8000)))
    measured, idle = served.models
    told = dict(word.removeprefix("--").partition("=")[::2] for word in flags.arguments())
    assert int(told.pop("kv-cache-memory-bytes")) == measured.kv_cache_memory
    assert told.pop("enforce-eager") == ""
    assert measured.engine["enforce_eager"] is True
    given = {name.replace("_", "-"): str(value) for name, value in measured.engine.items()}
    assert told == {name: value for name, value in given.items() if name != "enforce-eager"}
    assert idle.engine == measured.engine
    assert served.device(measured.devices[0]).cores == (0,)
    assert served.device(idle.devices[0]).cores == (1,)


ASKED = PrefixRequest(at_s=0.0, blocks=(0, 1), tokens=50, output_tokens=3)


def test_an_answers_times_are_those_of_its_tokens_alone() -> None:
    stream = read([delta("x"), delta(""), delta("y"), USAGE + DONE])
    found = answer(stream, [1.0, 1.5, 1.75, 1.75, 1.75], ASKED, due=0.5)
    assert found.times == (1.0, 1.5, 1.75)
    assert (found.ttft_ms, found.tpot_ms) == (500.0, 375.0)
    assert found.gaps_ms == [500.0, 250.0]
    assert found.handoff_ms == 250.0


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([delta("x"), delta("y")], "before"),
        ([delta("x"), event(error={"message": "engine gone"}), DONE], "engine gone"),
        ([USAGE, DONE], "in 0 events"),
        ([delta("x")] * 4 + [USAGE, DONE], "in 4 events"),
        ([delta("x"), event(usage={"prompt_tokens": 50, "completion_tokens": 2}), DONE], "2 token"),
        ([delta("x"), event(usage={"prompt_tokens": 49, "completion_tokens": 3}), DONE], "49 and"),
    ],
)
def test_an_answer_other_than_asked_for_is_refused(chunks: list[bytes], error: str) -> None:
    stream = read(chunks)
    with pytest.raises(RequestsFailedError, match=error):
        answer(stream, [1.0] * stream.events, ASKED, due=0.0)


def answered(tokens: int, ttft_ms: float, *gaps_ms: float) -> Answer:
    times = itertools.accumulate([ttft_ms, *gaps_ms])
    return Answer(0.0, tuple(at / 1000 for at in times), tokens, 1 + len(gaps_ms))


SLO = Slo.over(
    [answered(100, 10, 4, 4), answered(300, 30, 2, 2), answered(300, 50, 6, 6)],
    ttft_times=5,
    tpot_times=3,
)


def test_the_slo_is_a_multiple_of_the_idle_server_for_that_length_of_prompt() -> None:
    assert SLO.lengths == (100, 300)
    assert (*SLO.ttft_ms, SLO.tpot_ms) == pytest.approx((50, 200, 12))
    assert SLO.met(answered(200, 124, 12, 11))
    assert not SLO.met(answered(200, 126, 12, 11))
    assert not SLO.met(answered(200, 124, 12, 13))
    assert not SLO.met(answered(10, 51, 1))


def test_only_requests_that_were_continued_count_as_handed_over() -> None:
    page = (
        "# TYPE loomserve_handoffs_total counter\n"
        'loomserve_handoffs_total{model="m",outcome="continued",replica="a"} 12.0\n'
        'loomserve_handoffs_total{outcome="continued",replica="b"} 3\n'
        'loomserve_handoffs_total{outcome="recomputed",replica="b"} 100.0\n'
        'loomserve_handoffs_created{outcome="continued",replica="b"} 1e9\n'
    )
    assert continued(page) == 15
    assert continued("") == 0


def test_the_hand_off_is_what_the_second_token_waits_beyond_a_later_one_and_the_copy() -> None:
    rounds = [[answered(64, 9, 30 + n, 10, 10), answered(256, 9, 50 + n, 10, 10)] for n in range(3)]
    found = disaggregation.handoff(list(itertools.chain(*rounds)), {64: 1.0, 256: 3.0})
    assert found["handoff_ms_p50"] == pytest.approx(31)
    assert found["handoff_over_copy_ms_p50"] == pytest.approx(29)
    assert found["handoff_spread"]["handoff_ms_p50"]["max"] == pytest.approx(32)
    assert found["handoff_by_prompt"]["256"]["handoff_ms_p50"] == pytest.approx(41)


def test_the_probes_are_rounds_of_all_lengths_that_share_no_prefix() -> None:
    found = disaggregation.probes()
    lengths = disaggregation.PROBE_LENGTHS
    assert tuple(one.tokens for one in found) == lengths * disaggregation.PROBES
    assert len({one.blocks[0] for one in found}) == len(found)


def test_separation_is_compared_a_pair_and_apart_for_long_prompts() -> None:
    unified = [answered(100 * n, 10, 5, 5) for n in range(1, 7)]
    separated = [answered(100 * n, 10 * n, 10, 5) for n in range(1, 7)]
    found = disaggregation.comparison([(separated, unified)] * 3, SLO)
    assert found["ttft_p50_ratio"] == pytest.approx(3.5)
    assert found["tpot_p50_ratio"] == pytest.approx(1.5)
    assert found["goodput_ratio"] == 1.0
    assert found["unified"]["requests"] == 18
    assert found["long_prompts"]["from_tokens"] == 500
    assert found["long_prompts"]["ttft_p50_ratio"] == pytest.approx(5.5)
    assert found["long_prompts"]["separated"]["requests"] == 6
    agreed = {
        *("tpot_p99_ratio", "itl_p99_ratio", "ttft_p50_ratio", "ttft_p99_ratio", "goodput_ratio")
    }
    assert agreed <= found.keys()
    assert agreed <= found["long_prompts"].keys()
    assert agreed <= found["spread"].keys()


def test_goodput_has_a_ratio_even_where_the_unified_arm_meets_no_slo() -> None:
    late = [answered(100, 1e4, 5)] * 4
    assert disaggregation.comparison([(late, late)], SLO)["goodput_ratio"] == 0
    early = [answered(100, 1, 5)] * 4
    assert disaggregation.comparison([(early, late)], SLO)["goodput_ratio"] == 4


def test_both_arms_are_one_configuration_but_for_the_roles(tmp_path: Path) -> None:
    names = (disaggregation.SEPARATED, disaggregation.UNIFIED)
    for name in names:
        disaggregation.arm(name, "/models/m", 8000, tmp_path)
    separated, unified = (
        config.parse((tmp_path / f"{name}.yaml").read_text(encoding="utf-8")) for name in names
    )
    roles = separated.models[0].roles
    assert roles is not None
    assert (roles.prefill, roles.decode, unified.models[0].roles) == (1, 1, None)
    assert separated.models[0].model_copy(update={"roles": None}) == unified.models[0]
    assert separated.model_copy(update={"models": unified.models}) == unified
