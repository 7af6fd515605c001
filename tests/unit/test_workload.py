from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.workload import (
    BLOCK_TOKENS,
    PrefixRequest,
    conversations,
    mooncake,
    reuse,
    spread_over,
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


@pytest.mark.parametrize(("counts", "expected"), [([5, 5], 0.0), ([0, 10], 1.0), ([0, 0], 0.0)])
def test_the_spread_over_replicas_is_zero_when_all_got_the_same(
    counts: list[int], expected: float
) -> None:
    assert spread_over(counts) == pytest.approx(expected)
