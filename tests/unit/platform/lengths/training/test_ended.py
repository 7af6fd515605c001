from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lengths.training.learner import EndedRequests

MOST, FEWEST = 100, 5
ASKED = st.lists(st.sampled_from(["alice", "bob", "carol"]), max_size=300)


def taken(asked: list[str]) -> list[tuple[str, int]]:
    ended = EndedRequests(MOST, FEWEST)
    for number, key in enumerate(asked):
        ended.add(key, (key, number))
    return ended.take()


@given(ASKED)
def test_no_key_outnumbers_the_others_in_a_round(asked: list[str]) -> None:
    counts = Counter(key for key, _ in taken(asked))
    assert sum(counts.values()) <= MOST
    if len(set(asked)) > 1:
        for key, count in counts.items():
            assert count <= max(FEWEST, sum(counts.values()) - counts[key])


@given(ASKED)
def test_of_each_key_the_latest_are_taken_in_their_order(asked: list[str]) -> None:
    for key in set(asked):
        numbers = [number for by, number in taken(asked) if by == key]
        of_key = [number for number, by in enumerate(asked) if by == key]
        assert numbers == of_key[len(of_key) - len(numbers) :]


def test_a_key_that_floods_pushes_no_other_out() -> None:
    counts = Counter(key for key, _ in taken(["bob"] * 30 + ["alice"] * 10_000))
    assert counts == {"bob": 30, "alice": 30}


def test_a_key_alone_teaches_with_all_that_it_asks() -> None:
    assert len(taken(["alice"] * 70)) == 70
    assert len(taken([""] * 70)) == 70


def test_a_key_that_floods_while_others_are_quiet_teaches_little() -> None:
    ended = EndedRequests(MOST, FEWEST)
    ended.add("bob", "bob")
    ended.take()
    for _ in range(50):
        ended.add("alice", "alice")
    assert len(ended.take()) == FEWEST
    assert ended.take() == []
