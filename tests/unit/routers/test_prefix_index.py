"""The index of prompts that were sent: its matches, its bounds, and what it forgets."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.block_keys import token_keys
from loomserve.routers.prefix_index import PrefixIndex

REPLICAS = st.sampled_from("abc")
SALTS = st.sampled_from([None, "alice", "bob"])
# Of two tokens, so that prompts branch off each other everywhere.
PROMPTS = st.lists(st.integers(0, 1), max_size=8).map(tuple)


def keys(prompt: tuple[int, ...], salt: str | None = None) -> tuple[bytes, ...]:
    return token_keys(prompt, model="m", salt=salt, block_tokens=1)


@given(st.lists(st.tuples(REPLICAS, PROMPTS, SALTS), max_size=30), PROMPTS, SALTS)
def test_the_match_is_the_longest_of_all_prompts_sent_under_the_same_salt(
    sent: list[tuple[str, tuple[int, ...], str | None]], prompt: tuple[int, ...], salt: str | None
) -> None:
    index = PrefixIndex()
    for replica_id, earlier, its in sent:
        index.sent(replica_id, keys(earlier, its))
    longest = {
        replica_id: max(
            blocks
            for blocks in range(len(prompt) + 1)
            if blocks == 0
            or any(
                id_ == replica_id and its == salt and earlier[:blocks] == prompt[:blocks]
                for id_, earlier, its in sent
                if len(earlier) >= blocks
            )
        )
        for replica_id in "abc"
    }
    assert index.match(keys(prompt, salt)) == {id_: n for id_, n in longest.items() if n}


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
        assert index.sizes() == {"a": len(used)}
    for prompt, _ in sent:
        kept_of_it = [end for end in range(1, len(prompt) + 1) if prompt[:end] in used]
        assert index.match(keys(prompt)).get("a", 0) == max(kept_of_it, default=0)


def test_of_a_prompt_longer_than_the_bound_the_beginning_is_kept() -> None:
    index = PrefixIndex(3)
    index.sent("a", keys((0,) * 8))
    assert index.match(keys((0,) * 8)) == {"a": 3}


def test_replicas_that_are_gone_are_forgotten() -> None:
    index = PrefixIndex()
    for replica_id in "abc":
        index.sent(replica_id, keys((1, 0)))
    index.retain({"b", "new"})
    assert index.match(keys((1, 0))) == {"b": 2}
    assert index.sizes() == {"b": 2}


def test_threads_may_send_match_and_forget_at_once() -> None:
    index = PrefixIndex(50)

    def one(number: int) -> None:
        replica_id = f"r{number % 7}"
        prompt = tuple((number >> bit) & 1 for bit in range(10))
        index.sent(replica_id, keys(prompt))
        assert all(0 < blocks <= 10 for blocks in index.match(keys(prompt)).values())
        assert all(size <= 50 for size in index.sizes().values())
        if number % 50 == 0:
            index.retain({"r1", "r2"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(2_000)))
    index.retain({"r1"})
    assert set(index.sizes()) == {"r1"}
    assert index.sizes()["r1"] <= 50
