from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workload import (
    AZURE_LIKE,
    BLOCK_TOKENS,
    Arrival,
    PrefixRequest,
    azure,
    azure_like,
    conversations,
    documents,
    mooncake,
    reuse,
    scaled_down,
    window,
)


def request(*blocks: int) -> PrefixRequest:
    return PrefixRequest(0.0, blocks, len(blocks) * BLOCK_TOKENS, 2)


def test_equal_leading_blocks_are_equal_tokens_and_another_seed_gives_others() -> None:
    one, other = request(1, 2, 3), request(1, 2, 4)
    assert one.prompt("a")[:64] == other.prompt("a")[:64]
    assert one.prompt("a")[64:] != other.prompt("a")[64:]
    assert one.prompt("b")[:8] != one.prompt("a")[:8]
    assert len(one.prompt("a")) == 3 * BLOCK_TOKENS


def test_reuse_counts_leading_blocks_that_came_before() -> None:
    assert reuse([request(1, 2), request(1, 2, 3), request(9, 2)]) == pytest.approx(2 / 7)


def test_generated_conversations_share_most_of_their_blocks_and_fit_the_context() -> None:
    found = conversations(requests=200, rate=2.0, max_blocks=40, seed="s")
    assert 0.5 < reuse(found) < 0.95
    assert max(len(one.blocks) for one in found) <= 40
    assert found[-1].at_s == pytest.approx(100, rel=0.4)
    assert found == conversations(requests=200, rate=2.0, max_blocks=40, seed="s")


def test_each_round_asks_about_each_document_once_in_another_order() -> None:
    rounds = documents(documents=30, rounds=3, tokens=(1024, 1792), output_tokens=8, seed="s")
    texts = [[one.blocks[:-1] for one in each] for each in rounds]
    assert {frozenset(each) for each in texts} == {frozenset(texts[0])}
    assert len(set(texts[0])) == 30
    assert texts[0] != texts[1] != texts[2]
    questions = [one.blocks[-1] for each in rounds for one in each]
    assert len(set(questions) - {block for text in texts[0] for block in text}) == 90
    lengths = [BLOCK_TOKENS * len(text) for text in texts[0]]
    assert 1024 <= min(lengths) < 1200 < 1600 < max(lengths) <= 1792


def trace(path: Path, rows: list[tuple[int, list[int]]]) -> Path:
    with gzip.open(path, "wt") as out:
        for at, blocks in rows:
            row = {"timestamp": at, "input_length": 512 * len(blocks), "output_length": 160}
            out.write(json.dumps(row | {"hash_ids": blocks}) + "\n\n")
    return path


def test_a_trace_gives_whole_conversations_in_its_order_at_the_rate_asked_for(
    tmp_path: Path,
) -> None:
    several = [(t, [0, 10, 11][: t + 1] if t else [0, 10]) for t in range(3)]
    alone = [(10 + i, [0, 100 + i]) for i in range(20)]
    path = trace(tmp_path / "t.jsonl.gz", [*several, *alone])
    found = mooncake(path, requests=3, rate=2.0, max_blocks=8, seed="s")
    assert [one.at_s for one in found] == [0.0, 0.5, 1.0]
    assert all(one.blocks[:2] == (0, 10) for one in found)
    assert found[-1].output_tokens == 10
    assert found[-1].tokens == len(found[-1].blocks) * BLOCK_TOKENS


def test_a_trace_without_enough_conversations_is_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl.gz", [(i, [0, i + 1]) for i in range(30)])
    with pytest.raises(ValueError, match="conversations"):
        mooncake(path, requests=3, rate=1.0, max_blocks=8, seed="s")


def test_an_azure_trace_gives_seconds_from_its_first_request_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with gzip.open(path, "wt", newline="") as out:
        out.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        out.write("2023-11-16 23:59:59.5000000,374,44\r\n")
        out.write("2023-11-17 00:00:01.7500000,396,109\r\n")
    assert azure(path) == [Arrival(0.0, 374, 44), Arrival(2.25, 396, 109)]


def test_lengths_shrink_and_what_exceeds_the_context_is_left_out() -> None:
    found = scaled_down([Arrival(0, 400, 40), Arrival(1, 8000, 100), Arrival(2, 3, 6)], 1024)
    assert found == [Arrival(0, 50, 10), Arrival(2, 1, 2)]
    assert scaled_down([Arrival(1, 8000, 96)], 1024) == [Arrival(1, 1000, 24)]


def test_each_likeness_has_its_traces_rate_and_median_lengths() -> None:
    for kind, likeness in AZURE_LIKE.items():
        found = azure_like(kind, requests=4000, seed="s")
        assert found[-1].at_s == pytest.approx(4000 / likeness.rate, rel=0.1)
        medians = (
            statistics.median(one.prompt_tokens for one in found),
            statistics.median(one.output_tokens for one in found),
        )
        expected = (math.exp(likeness.prompt[0]), math.exp(likeness.output[0]))
        assert medians == pytest.approx(expected, rel=0.1)
        assert found != azure_like(kind, requests=4000, seed="other")


@given(
    gaps=st.lists(st.floats(1e-3, 1e3, exclude_min=True), min_size=4, max_size=40),
    share=st.floats(0.1, 1),
    rate=st.floats(0.1, 100),
    seed=st.text(max_size=3),
)
def test_a_window_keeps_the_traces_order_and_bursts_at_the_rate_asked_for(
    gaps: list[float], share: float, rate: float, seed: str
) -> None:
    times = list(itertools.accumulate(gaps))
    arrivals = [Arrival(at, 10 + number, 2 + number) for number, at in enumerate(times)]
    requests = max(2, int(share * len(arrivals)))
    found = window(arrivals, requests=requests, rate=rate, seed=seed)
    start = found[0].tokens - 10
    assert [one.tokens for one in found] == [10 + start + i for i in range(requests)]
    assert [one.output_tokens for one in found] == [2 + start + i for i in range(requests)]
    assert found[0].at_s == 0
    assert found[-1].at_s == pytest.approx((requests - 1) / rate)
    stretch = found[-1].at_s / (times[start + requests - 1] - times[start])
    gaps_found = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    assert gaps_found == pytest.approx(
        [gap * stretch for gap in gaps[start + 1 : start + requests]], rel=1e-3, abs=1e-6
    )


def test_requests_of_a_window_share_no_prefix_and_have_their_lengths() -> None:
    arrivals = [Arrival(float(i), 1 + 31 * i, 2) for i in range(20)]
    found = window(arrivals, requests=20, rate=1.0, seed="s")
    assert reuse(found) == 0
    assert [len(one.prompt("a")) for one in found] == [1 + 31 * i for i in range(20)]


@pytest.mark.parametrize(("count", "requests"), [(5, 6), (5, 1), (0, 2)])
def test_a_window_that_the_trace_cannot_give_is_refused(count: int, requests: int) -> None:
    arrivals = [Arrival(float(i), 10, 10) for i in range(count)]
    with pytest.raises(ValueError, match="make no window"):
        window(arrivals, requests=requests, rate=1.0, seed="s")


def test_requests_that_arrive_at_once_have_no_rate() -> None:
    with pytest.raises(ValueError, match="at once"):
        window([Arrival(1.0, 10, 10)] * 5, requests=3, rate=1.0, seed="s")
