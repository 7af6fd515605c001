"""Routing policies: tables for the rules, properties for what must hold for any load."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.state.roles import Role
from loomserve.routers.base import Decision
from loomserve.routers.in_flight import Assigned
from loomserve.routers.policies import load_aware, power_of_two, round_robin
from tests.unit.routers.policies.fleets import (
    LIMIT,
    NOBODY,
    NOW,
    Pick,
    candidates,
    fleets,
    load,
    mixed_fleets,
    picked,
    raised,
    replica,
    table_of,
)
from tests.unit.routers.reference import ReplicaSeen as Replica

picks = st.one_of(
    st.floats(0.1, 2).map(lambda limit: partial(load_aware.pick, load_limit=limit)),
    st.integers(0, 99).map(lambda turn: partial(round_robin.pick, turn=turn)),
    st.integers(0, 99).map(lambda seed: partial(power_of_two.pick, rng=random.Random(seed))),
)


LOAD_AWARE = partial(load_aware.pick, load_limit=LIMIT)


@given(mixed_fleets, picks, st.data())
def test_a_pick_neither_drains_nor_is_excluded_nor_prefills_where_others_answer(
    fleet: list[Replica], pick: Pick, data: st.DataObject
) -> None:
    exclude = data.draw(st.frozensets(st.sampled_from([r.id for r in fleet])))
    willing = [r for r in fleet if not r.draining and r.id not in exclude]
    allowed = {r.id for r in willing if r.role is not Role.PREFILL} or {r.id for r in willing}
    table = table_of(fleet)
    eligible = table.candidates(exclude=exclude, now=NOW)
    assert {table.ids[row] for row in eligible.rows} == allowed
    if allowed:
        assert table.ids[eligible.rows[pick(eligible).place]] in allowed


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        pytest.param(
            [replica("a", running=3), replica("b", running=2)],
            Decision("b", "least_loaded"),
            id="fewer running requests",
        ),
        pytest.param(
            [replica("a", running=2, kv=0.5), replica("b", running=4, kv=0.1)],
            Decision("b", "least_loaded"),
            id="compute and KV cache weigh the same",
        ),
        pytest.param(
            [replica("a", running=4), replica("b", running=2, max_running=4)],
            Decision("a", "least_loaded"),
            id="shares count, not numbers",
        ),
        pytest.param(
            [replica("a", running=10, kv=0.5), replica("b", running=10, kv=0.625)],
            Decision("a", "least_loaded"),
            id="below the limit",
        ),
        pytest.param(
            [replica("a", running=10, kv=0.6), replica("b", running=9, kv=0.75)],
            Decision("b", "shortest_queue"),
            id="at the limit the shorter queue counts",
        ),
        pytest.param(
            [replica("a", running=10, waiting=50, kv=0.1), replica("b", running=10, kv=0.5)],
            Decision("b", "least_loaded"),
            id="a flooded replica is not taken for a full one",
        ),
        pytest.param(
            [replica("b", running=5), replica("a", running=4, kv=0.1)],
            Decision("a", "least_loaded"),
            id="equal utilisation: the shorter queue",
        ),
        pytest.param(
            [replica("b", running=10, kv=0.7), replica("a", running=10, kv=0.8)],
            Decision("b", "shortest_queue"),
            id="equal queues above the limit: the lower utilisation",
        ),
        pytest.param(
            [replica("b"), replica("a")],
            Decision("a", "least_loaded"),
            id="all equal: the smallest id",
        ),
        pytest.param(
            [Replica("a", max_running=10), replica("b", running=9)],
            Decision("b", "least_loaded"),
            id="a known load below the limit before an unknown one",
        ),
        pytest.param(
            [Replica("a", max_running=10), replica("b", running=20)],
            Decision("a", "shortest_queue"),
            id="a new replica relieves a full one",
        ),
        pytest.param(
            [Replica("a", assigned=Assigned(2)), Replica("b", assigned=Assigned(1))],
            Decision("b", "least_loaded"),
            id="nothing known: what is open here",
        ),
    ],
)
def test_load_aware_dispatches_as_the_algorithm_says(
    fleet: list[Replica], expected: Decision
) -> None:
    assert picked(fleet, LOAD_AWARE) == expected
    assert picked(fleet[::-1], LOAD_AWARE) == expected


@given(fleets, st.floats(0.1, 2))
def test_load_aware_takes_the_least_utilisation_below_the_limit_and_else_the_shortest_queue(
    fleet: list[Replica], limit: float
) -> None:
    decision = picked(fleet, partial(load_aware.pick, load_limit=limit))
    chosen = next(r for r in fleet if r.id == decision.replica_id)
    rivals = [r for r in fleet if r.load is not None] or fleet
    if min(r.utilisation for r in rivals) < limit:
        assert decision.reason == "least_loaded"
        assert chosen in rivals
        assert chosen.utilisation == min(r.utilisation for r in rivals)
    else:
        assert decision.reason == "shortest_queue"
        assert chosen.queue_length == min(r.queue_length for r in fleet)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 400), st.booleans())
def test_load_aware_spreads_a_burst_evenly_over_idle_replicas(
    replicas: int, rounds: int, tokens: int, known: bool
) -> None:
    fleet = {
        str(i): replica(str(i)) if known else Replica(str(i), max_running=10)
        for i in range(replicas)
    }
    for sent in range(1, replicas * rounds + 1):
        chosen = picked(list(fleet.values()), LOAD_AWARE).replica_id
        fleet[chosen] = raised(fleet[chosen], tokens)
        given_out = [r.assigned.requests for r in fleet.values()]
        assert sum(given_out) == sent
        assert max(given_out) - min(given_out) <= 1


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 60))
def test_load_aware_fills_the_gap_between_skewed_queues(a: int, b: int, requests: int) -> None:
    fleet = {"a": replica("a", running=a), "b": replica("b", running=b)}
    for _ in range(requests):
        chosen = picked(list(fleet.values()), LOAD_AWARE).replica_id
        fleet[chosen] = raised(fleet[chosen], 0)
    gap = abs(fleet["a"].queue_length - fleet["b"].queue_length)
    assert gap <= max(1, abs(a - b) - requests)


@pytest.mark.parametrize(
    ("age_s", "known"), [(-3.0, True), (0.0, True), (10.0, True), (10.1, False), (1e9, False)]
)
def test_a_load_report_counts_until_it_is_too_old(age_s: float, known: bool) -> None:
    table = table_of([Replica("a", load(running=5, age_s=age_s), max_running=10)])
    seen = candidates(table)
    assert seen.known.tolist() == [known]
    assert seen.queue_length.tolist() == [5 if known else 0]
    assert (table.replica(0).load is not None) == known


def test_a_pinned_request_goes_to_its_replica_or_nowhere() -> None:
    fleet = [replica("a"), replica("b", running=9)]
    for pin, exclude, allowed in (("b", NOBODY, ["b"]), ("b", {"b"}, []), ("c", NOBODY, [])):
        table = table_of(fleet)
        seen = table.candidates(exclude=frozenset(exclude), pinned_to=pin, now=NOW)
        assert [table.ids[row] for row in seen.rows] == allowed


def test_a_replica_that_went_silent_takes_nothing_while_another_has_room() -> None:
    table = table_of([Replica("a", load(age_s=60), max_running=10), replica("b", running=9)])
    seen = candidates(table)
    choice = LOAD_AWARE(seen)
    assert (table.ids[seen.rows[choice.place]], choice.reason) == ("b", "least_loaded")


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        pytest.param(0, 0, 7, id="others' requests are in the report"),
        pytest.param(3, 3, 7, id="mine are in it, too"),
        pytest.param(5, 3, 9, id="those I started since are added"),
        pytest.param(1, 3, 5, id="those I finished since are taken off"),
        pytest.param(9, 9, 9, id="mine that had not arrived at the measurement still count"),
        pytest.param(0, 20, 0, id="never below what is open here"),
    ],
)
def test_a_queue_is_the_report_carried_forward_by_what_happened_here(
    now: int, then: int, expected: int
) -> None:
    seen = Replica(
        "a",
        load(running=4, waiting=3),
        assigned=Assigned(now),
        assigned_when_measured=Assigned(then),
    )
    assert candidates(table_of([seen])).queue_length.tolist() == [expected]


@pytest.mark.parametrize(
    ("capacity", "now", "then", "expected"),
    [
        pytest.param(1_000, 0, 0, 0.5, id="as measured"),
        pytest.param(1_000, 300, 100, 0.7, id="plus what was promised since"),
        pytest.param(1_000, 9_000, 0, 1.0, id="at most all of it"),
        pytest.param(1_000, 0, 9_000, 0.0, id="at least nothing"),
        pytest.param(None, 9_000, 0, 0.5, id="capacity unknown: as measured"),
    ],
)
def test_kv_cache_usage_is_carried_forward_alike(
    capacity: int | None, now: int, then: int, expected: float
) -> None:
    seen = Replica(
        "a",
        load(kv=0.5),
        kv_capacity_tokens=capacity,
        assigned=Assigned(0, now),
        assigned_when_measured=Assigned(0, then),
    )
    here = candidates(table_of([seen])).utilisation[0]
    assert here - seen.queue_length == pytest.approx(expected)


@given(fleets)
def test_utilisation_stays_within_two_while_nothing_waits_for_a_place(fleet: list[Replica]) -> None:
    table = table_of(fleet)
    seen = candidates(table)
    for row, utilisation in enumerate(seen.utilisation):
        assert utilisation >= 0
        if seen.queue_length[row] <= table.replica(row).max_running:
            assert utilisation <= 2


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_round_robin_gives_each_replica_the_same_number_of_turns(
    replicas: int, rounds: int, start: int
) -> None:
    fleet = [Replica(str(i)) for i in range(replicas)]
    turns = range(start, start + replicas * rounds)
    taken = Counter(
        picked(fleet, partial(round_robin.pick, turn=turn)).replica_id for turn in turns
    )
    assert taken == {r.id: rounds for r in fleet}


def test_round_robin_keeps_its_order_when_the_replicas_come_in_another() -> None:
    fleet = [Replica("a"), Replica("b"), Replica("c")]
    for turn in range(6):
        expected = picked(fleet, partial(round_robin.pick, turn=turn))
        assert picked(fleet[::-1], partial(round_robin.pick, turn=turn)) == expected


def test_power_of_two_never_takes_the_longest_queue_and_sometimes_each_other() -> None:
    fleet = [replica("a", running=1), replica("b", running=2), replica("c", running=3)]
    rng = random.Random(0)
    taken = Counter(
        picked(fleet, partial(power_of_two.pick, rng=rng)).replica_id for _ in range(600)
    )
    assert taken["c"] == 0
    assert 340 < taken["a"] < 460  # two of the three pairs have a in them


def test_power_of_two_breaks_ties_by_chance() -> None:
    fleet = [replica("a"), replica("b")]
    rng = random.Random(0)
    taken = Counter(
        picked(fleet, partial(power_of_two.pick, rng=rng)).replica_id for _ in range(600)
    )
    assert 240 < taken["a"] < 360
