"""The index of prompts that were sent: its matches, its bounds, and what it forgets."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.prefix_index import Held, PrefixIndex, token_keys
from tests.unit.routers.reference import matched_blocks

IDS = ("a", "b", "c")
REPLICAS = st.sampled_from(IDS)
SALTS = st.sampled_from([None, "alice", "bob"])
# Of two tokens, so that prompts branch off each other everywhere.
PROMPTS = st.lists(st.integers(0, 1), max_size=8).map(tuple)


def keys(prompt: tuple[int, ...], salt: str | None = None) -> tuple[int, ...]:
    return token_keys(prompt, model="m", salt=salt, block_tokens=1)


def sizes(index: PrefixIndex) -> dict[str, int]:
    return {id_: len(known) for id_, known in index._sent.items()}


def matched(
    index: PrefixIndex,
    prompt: tuple[int, ...],
    salt: str | None = None,
    ids: tuple[str, ...] = IDS,
) -> list[int]:
    levels = index.match(keys(prompt, salt))
    if not levels:
        return [0] * len(ids)
    found = Held(levels, ids, {id_: row for row, id_ in enumerate(ids)})
    there = [*found.levels, 0]
    blocks = [there[found.level(row)] for row in range(len(ids))]
    assert found.column(np.arange(len(ids))).tolist() == blocks
    for level, most in enumerate(found.levels):
        assert [blocks[row] >= most for row in range(len(ids))] == [
            row in found.rows(level) for row in range(len(ids))
        ]
    return blocks


@given(st.lists(st.tuples(REPLICAS, PROMPTS, SALTS), max_size=30), PROMPTS, SALTS)
def test_the_match_is_the_longest_of_all_prompts_sent_under_the_same_salt(
    sent: list[tuple[str, tuple[int, ...], str | None]], prompt: tuple[int, ...], salt: str | None
) -> None:
    index = PrefixIndex()
    for replica_id, earlier, its in sent:
        index.sent(replica_id, keys(earlier, its))
    longest = [
        max(
            blocks
            for blocks in range(len(prompt) + 1)
            if blocks == 0
            or any(
                id_ == replica_id and its == salt and earlier[:blocks] == prompt[:blocks]
                for id_, earlier, its in sent
                if len(earlier) >= blocks
            )
        )
        for replica_id in IDS
    ]
    assert matched(index, prompt, salt) == longest
    assert matched(index, prompt, salt, ids=("c", "x", "a")) == [longest[2], 0, longest[0]]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(PROMPTS, st.none() | st.integers(0, 12)), min_size=1, max_size=40),
)
def test_a_replica_keeps_the_most_recent_blocks_and_never_more_than_the_bound(
    most: int, sent: list[tuple[tuple[int, ...], int | None]]
) -> None:
    index = PrefixIndex(most)
    # Written down apart: each prefix by the time of its last use.
    used: OrderedDict[tuple[int, ...], int] = OrderedDict()
    for now, (prompt, own) in enumerate(sent):
        bound = most if own is None else min(own, most)
        index.sent("a", keys(prompt), own)
        used.update({prompt[:end]: now for end in range(1, min(len(prompt), bound) + 1)})
        kept = sorted(used, key=lambda prefix: (-used[prefix], len(prefix)))[:bound]
        used = OrderedDict((prefix, used[prefix]) for prefix in kept)
        assert sizes(index) == {"a": len(used)}
    for prompt, _ in sent:
        kept_of_it = [end for end in range(1, len(prompt) + 1) if prompt[:end] in used]
        assert matched(index, prompt)[0] == max(kept_of_it, default=0)


def test_of_a_prompt_longer_than_the_bound_the_beginning_is_kept() -> None:
    index = PrefixIndex(3)
    index.sent("a", keys((0,) * 8))
    assert matched(index, (0,) * 8) == [3, 0, 0]


def test_replicas_that_are_gone_are_forgotten() -> None:
    index = PrefixIndex()
    for replica_id in "abc":
        index.sent(replica_id, keys((1, 0)))
    index.retain({"b", "new"})
    assert matched(index, (1, 0)) == [0, 2, 0]
    assert sizes(index) == {"b": 2}
    index.sent("new", keys((1, 1)))
    assert matched(index, (1, 1), ids=("new", "b", "a")) == [2, 1, 0]
    index.retain(())
    assert index.match(keys((1, 0))) == []


@given(st.lists(st.tuples(st.integers(0, 39), PROMPTS), max_size=120), PROMPTS)
def test_the_match_is_the_same_where_many_replicas_were_sent_the_same(
    sent: list[tuple[int, tuple[int, ...]]], prompt: tuple[int, ...]
) -> None:
    index, known = PrefixIndex(), {f"r{number}": set[int]() for number in range(40)}
    for replica_id in list(known)[:30]:
        index.sent(replica_id, keys(prompt[:2]))
        known[replica_id].update(keys(prompt[:2]))
    for number, earlier in sent:
        index.sent(f"r{number}", keys(earlier))
        known[f"r{number}"].update(keys(earlier))
    expected = matched_blocks(keys(prompt), known)
    ids = tuple(known)
    assert matched(index, prompt, ids=ids) == [expected.get(id_, 0) for id_ in ids]


def test_threads_may_send_match_and_forget_at_once() -> None:
    index = PrefixIndex(50)

    def one(number: int) -> None:
        replica_id = f"r{number % 7}"
        prompt = tuple((number >> bit) & 1 for bit in range(10))
        index.sent(replica_id, keys(prompt))
        assert all(0 < blocks <= 10 for blocks, _ in index.match(keys(prompt)))
        with index._lock:
            assert all(size <= 50 for size in sizes(index).values())
        if number % 50 == 0:
            index.retain({"r1", "r2"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(2_000)))
    index.retain({"r1"})
    assert set(sizes(index)) == {"r1"}
    assert sizes(index)["r1"] <= 50
