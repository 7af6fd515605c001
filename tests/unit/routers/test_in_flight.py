"""The ledger of open requests, and what becomes of a report that is joined with it."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.state.roles import Role
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import NOTHING, Assigned, Booking, InFlight
from loomserve.routers.policy_choice import RoutingTicket
from loomserve.routers.snapshot import RoutingStats
from tests.unit.routers.tables import reported


def test_a_request_counts_from_its_start_to_its_end() -> None:
    ledger, booking = InFlight(), Booking()
    ledger.started(booking, "a", tokens=100, now=1.0)
    assert ledger.of("a") == Assigned(1, 100)
    ledger.finished(booking, now=3.0)
    assert ledger.of("a") == NOTHING
    assert [ledger.of("a", at) for at in (0.5, 1.0, 2.9, 3.0)] == [
        NOTHING,
        Assigned(1, 100),
        Assigned(1, 100),
        NOTHING,
    ]


def test_a_request_that_is_routed_again_moves() -> None:
    ledger, booking = InFlight(), Booking()
    ledger.started(booking, "a", tokens=100, now=1.0)
    ledger.started(booking, "b", tokens=100, now=2.0)
    assert (ledger.of("a"), ledger.of("b")) == (NOTHING, Assigned(1, 100))


def test_a_request_that_ended_before_it_was_routed_is_never_counted() -> None:
    ledger, booking = InFlight(), Booking()
    ledger.finished(booking, now=1.0)
    ledger.started(booking, "a", tokens=100, now=2.0)
    assert ledger.of("a") == NOTHING
    assert not ledger._records


def test_ending_a_request_twice_counts_once() -> None:
    ledger, first, second = InFlight(), Booking(), Booking()
    ledger.started(first, "a", tokens=1, now=1.0)
    ledger.started(second, "a", tokens=2, now=1.0)
    ledger.finished(first, now=2.0)
    ledger.finished(first, now=3.0)
    assert ledger.of("a") == Assigned(1, 2)


def test_replicas_that_vanished_are_forgotten_and_busy_ones_are_not() -> None:
    ledger, busy = InFlight(retain_s=10.0), Booking()
    ledger.started(busy, "busy", tokens=1, now=0.0)
    for i in range(100):
        booking = Booking()
        ledger.started(booking, f"gone-{i}", tokens=1, now=float(i))
        ledger.finished(booking, now=float(i))
    assert len(ledger._records) <= 13
    ledger.started(Booking(), "new", tokens=1, now=200.0)
    assert ledger._records.keys() == {"busy", "new"}
    ledger.finished(busy, now=201.0)
    assert ledger.of("busy") == NOTHING


def test_a_clock_that_steps_back_does_not_unsort_the_history() -> None:
    ledger = InFlight()
    ledger.started(Booking(), "a", tokens=1, now=10.0)
    ledger.started(Booking(), "a", tokens=1, now=5.0)
    assert ledger.of("a", at=9.0) == NOTHING
    assert ledger.of("a", at=10.0) == Assigned(2, 2)


@given(
    st.lists(
        st.tuples(st.sampled_from("sf"), st.integers(0, 9), st.sampled_from("abc")), max_size=60
    )
)
def test_the_ledger_agrees_with_counting_afresh(actions: list[tuple[str, int, str]]) -> None:
    ledger = InFlight(retain_s=5.0)
    bookings = [Booking() for _ in range(10)]
    where: dict[int, str] = {}
    ended: set[int] = set()
    then: Counter[str] = Counter()
    for now, (action, number, target) in enumerate(actions, start=1):
        if action == "s":
            ledger.started(bookings[number], target, tokens=7, now=float(now))
            if number not in ended:
                where[number] = target
        else:
            ledger.finished(bookings[number], now=float(now))
            ended.add(number)
            where.pop(number, None)
        for id in "abc":
            count = list(where.values()).count(id)
            assert ledger.of(id) == Assigned(count, 7 * count)
            assert ledger.of(id, at=now - 0.5).requests == then[id]
            then[id] = count


def test_bookings_from_many_threads_add_up() -> None:
    ledger = InFlight()

    def one(number: int) -> None:
        booking = Booking()
        ledger.started(booking, "a", tokens=3, now=float(number))
        ledger.decided("m", "load_aware", "least_loaded")
        if number % 2:
            ledger.finished(booking, now=float(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(2_000)))
    assert ledger.of("a") == Assigned(1_000, 3_000)
    assert ledger.decisions() == {("m", "load_aware", "least_loaded"): 2_000}


@pytest.mark.parametrize("draining", [False, True])
def test_a_table_joins_the_report_with_the_ledger(draining: bool) -> None:
    ledger, old, new = InFlight(), Booking(), Booking()
    ledger.started(old, "a", tokens=10, now=1.0)
    ledger.started(new, "a", tokens=20, now=3.0)
    report = {
        "running": 4,
        "waiting": 2,
        "kv_cache_usage": 0.25,
        "step_time_s": 0.02,
        "measured_at": 2.0,
    }
    stats = {
        "load": report,
        "max_running": 8,
        "kv_capacity_tokens": 200,
        "draining": draining,
        "role": "decode",
        "told_at": 0.0,
    }
    table = reported(ledger, {"a": RoutingStats.model_validate(stats)})
    assert table.role("a") is Role.DECODE
    assert table.replica(0).queue_length == 7
    seen = table.candidates(exclude=frozenset(), now=3.0)
    assert len(seen) == (0 if draining else 1)
    assert seen.utilisation.tolist() == pytest.approx([7 / 8 + 0.25 + 20 / 200][: len(seen)])


@pytest.mark.parametrize(
    "stats",
    [
        None,
        RoutingStats(
            load=None,
            max_running=8,
            kv_capacity_tokens=None,
            draining=False,
            role=Role.UNIFIED,
            told_at=0.0,
        ),
    ],
    ids=["no report", "an engine that has not measured yet"],
)
def test_before_the_first_measurement_only_the_ledger_counts(stats: RoutingStats | None) -> None:
    ledger = InFlight()
    ledger.started(Booking(), "a", tokens=10, now=1.0)
    seen = reported(ledger, {"a": stats}).replica(0)
    assert seen.load is None
    assert seen.queue_length == 1


def test_a_request_of_several_sequences_counts_as_several() -> None:
    ledger = InFlight()
    with closing(RoutingTicket(ledger, prompt_tokens=10, output_tokens=20, sequences=4)) as ticket:
        ticket.book(Replica("a"), 1.0)
        assert ledger.of("a") == Assigned(4, 90)
        ticket.book(Replica("b"), 2.0)
        assert (ledger.of("a"), ledger.of("b")) == (NOTHING, Assigned(4, 90))
    assert ledger.of("b") == NOTHING
