"""Prefix-aware dispatch: what a prefix saves against what a load costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.base import Decision
from loomserve.routers.in_flight import Assigned
from loomserve.routers.policies import load_aware, prefix_aware
from tests.unit.routers.policies.fleets import LIMIT, fleets, load, picked, raised, replica
from tests.unit.routers.reference import ReplicaSeen as Replica
from tests.unit.routers.reference import held

LOAD_AWARE = partial(load_aware.pick, load_limit=LIMIT)
BLOCKS = 10
PROMPT = 100  # of 1,000 tokens of KV cache: computing all of it costs 0.4


def pick(fleet: list[Replica], matched: dict[str, int], prompt: int = PROMPT) -> Decision:
    return picked(
        fleet,
        partial(
            prefix_aware.pick,
            held=held(matched, sorted(one.id for one in fleet)),
            missing=lambda has: (1 - has / BLOCKS) * prompt,
            prompt_tokens=prompt,
            load_limit=LIMIT,
        ),
    )


@pytest.mark.parametrize(
    ("fleet", "matched", "expected"),
    [
        pytest.param(
            [replica("a"), replica("b")], {"b": 1}, Decision("b", "prefix"), id="equal loads"
        ),
        pytest.param(
            [replica("a"), replica("b", running=3)],
            {"b": 10},
            Decision("b", "prefix"),
            id="three of ten requests more are less than the prompt",
        ),
        pytest.param(
            [replica("a"), replica("b", running=5)],
            {"b": 10},
            Decision("a", "least_loaded"),
            id="five are more",
        ),
        pytest.param(
            [replica("a"), replica("b", running=3)],
            {"b": 5},
            Decision("a", "least_loaded"),
            id="three are more than half of the prompt",
        ),
        pytest.param(
            [replica("a"), replica("b", kv=0.3)],
            {"b": 10},
            Decision("b", "prefix"),
            id="KV cache in use counts like places",
        ),
        pytest.param(
            [replica("a", running=1), replica("b", running=4), replica("c")],
            {"a": 6, "b": 10},
            Decision("a", "prefix"),
            id="less of the prompt at less load",
        ),
        pytest.param(
            [replica("a"), replica("b", running=9), replica("c")],
            {"a": 2, "b": 10, "c": 2},
            Decision("a", "least_loaded"),
            id="what all have is no reason",
        ),
        pytest.param(
            [
                replica("a", running=10, waiting=20, kv=1),
                replica("b", running=10, waiting=22, kv=1),
            ],
            {"b": 10},
            Decision("b", "prefix"),
            id="where all are full, prefixes still count",
        ),
        pytest.param(
            [Replica("a"), replica("b", running=2)],
            {"a": 10},
            Decision("b", "least_loaded"),
            id="a replica that went silent has no claim",
        ),
        pytest.param(
            [Replica("a"), Replica("b", assigned=Assigned(1))],
            {"b": 10},
            Decision("b", "prefix"),
            id="nothing known: one request open here is less than a prompt",
        ),
        pytest.param(
            [Replica("a"), Replica("b", assigned=Assigned(5))],
            {"b": 10},
            Decision("a", "least_loaded"),
            id="nothing known: five are more",
        ),
    ],
)
def test_a_prefix_is_worth_what_it_saves(
    fleet: list[Replica], matched: dict[str, int], expected: Decision
) -> None:
    assert pick(fleet, matched) == expected
    assert pick(fleet[::-1], matched) == expected


def test_a_long_prefix_outweighs_a_load_that_a_short_one_does_not() -> None:
    fleet = [replica("a"), replica("b", running=5)]
    assert pick(fleet, {"b": 10}, prompt=100).replica_id == "a"
    assert pick(fleet, {"b": 10}, prompt=150).replica_id == "b"


@given(fleets, st.integers(0, 5_000))
def test_without_a_match_load_alone_decides(fleet: list[Replica], prompt: int) -> None:
    assert pick(fleet, {}, prompt) == picked(fleet, LOAD_AWARE)
    everywhere = {one.id: 3 for one in fleet}
    assert pick(fleet, everywhere, prompt) == picked(fleet, LOAD_AWARE)


@given(fleets, st.integers(0, 5_000), st.data())
def test_for_a_prefix_no_more_load_is_taken_on_than_it_saves(
    fleet: list[Replica], prompt: int, data: st.DataObject
) -> None:
    fleet = [replace(one, kv_capacity_tokens=1_000) for one in fleet]
    matched = {one.id: data.draw(st.integers(0, BLOCKS)) for one in fleet}
    decision = pick(fleet, matched, prompt)
    chosen = next(one for one in fleet if one.id == decision.replica_id)
    if decision.reason != "prefix":
        return
    assert matched[chosen.id] > min(matched.values())
    for other in fleet:
        if other.load is None and chosen.load is not None:
            continue
        saved = (matched[chosen.id] - matched[other.id]) / BLOCKS * prompt / 1_000
        more = chosen.utilisation - other.utilisation
        assert more <= prefix_aware.PREFILL_WEIGHT * saved + 1e-9


@given(st.integers(2, 5), st.integers(1, 60))
def test_a_popular_prefix_does_not_pile_up_on_one_replica(replicas: int, requests: int) -> None:
    fleet = {str(i): replica(str(i)) for i in range(replicas)}
    matched: Counter[str] = Counter()
    for _ in range(requests):
        id_ = pick(list(fleet.values()), dict(matched)).replica_id
        fleet[id_] = raised(fleet[id_], PROMPT)
        matched[id_] = BLOCKS
    given_out = [one.assigned.requests for one in fleet.values()]
    # A request is 0.1 + 0.1 of utilisation here, and the prompt is worth 0.4.
    assert max(given_out) - min(given_out) <= 2


def test_a_cache_of_unknown_size_is_no_error() -> None:
    fleet = [Replica("a", load(), max_running=10), Replica("b", load(running=3), max_running=10)]
    assert pick(fleet, {"b": BLOCKS}, prompt=0) == Decision("a", "least_loaded")
    assert pick(fleet, {"b": BLOCKS}) == Decision("b", "prefix")
