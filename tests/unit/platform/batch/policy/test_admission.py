"""Which lines start: what they may hold fits, online requests come first, and turns are fair."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.batch.dispatch import STALE_S, engines
from loomserve.platform.batch.live import RunningLine
from loomserve.platform.batch.policy.admission import (
    BatchCandidate,
    EngineCapacity,
    InFlightLine,
    LineQueue,
    LineWork,
    TokenCounters,
    admit,
    peak,
)
from loomserve.platform.batch.policy.lengths import LineLength, LineLengths
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.progress import BatchPace, is_late
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats

WORKS = st.builds(
    LineWork,
    held=st.integers(1, 200),
    left=st.integers(1, 200),
    sequences=st.integers(1, 3),
)
IN_FLIGHT = st.builds(InFlightLine, work=WORKS, measured=st.booleans(), ended=st.booleans())
ENGINES = st.builds(
    EngineCapacity,
    id=st.sampled_from("abcdef"),
    places=st.integers(1, 32),
    capacity=st.integers(100, 5000),
    running=st.integers(0, 8),
    waiting=st.integers(0, 1),
    used=st.integers(0, 2000),
    lines=st.lists(IN_FLIGHT, max_size=4).map(tuple),
)


@st.composite
def queues(draw: st.DrawFn) -> list[LineQueue]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        lines = [
            BatchCandidate(at, work.held + work.left, work)
            for at, work in enumerate(draw(st.lists(WORKS, max_size=8)))
        ]
        found.append(
            LineQueue(
                owner=draw(st.sampled_from(["alice", "bob"])),
                batch=f"batch_{number}",
                owner_served=0,
                served=draw(st.integers(0, 1000)),
                deadline_s=draw(st.integers(0, 100)),
                late=draw(st.booleans()),
                lines=sorted(lines, key=lambda line: line.expected),
            )
        )
    return found


def idle(**changes: object) -> EngineCapacity:
    given = {"id": "e", "places": 16, "capacity": 1000, "running": 0, "waiting": 0, "used": 0}
    return EngineCapacity(**{**given, **changes})  # type: ignore[arg-type]


def a_queue(*lines: LineWork, **changes: object) -> LineQueue:
    given = {"owner": "alice", "batch": "b", "owner_served": 0, "served": 0, "deadline_s": 100}
    candidates = [BatchCandidate(n, w.held + w.left, w) for n, w in enumerate(lines)]
    return LineQueue(**{**given, "late": False, "lines": candidates, **changes})  # type: ignore[arg-type]


def step_by_step(works: list[LineWork]) -> float:
    """The peak by counting: each sequence gets a token a step, and leaves with its last."""
    most = sum(work.held * work.sequences for work in works)
    for step in range(1, int(max((work.left for work in works), default=0)) + 1):
        there = [work for work in works if work.left >= step]
        most = max(most, sum((work.held + step) * work.sequences for work in there))
    return most


@settings(deadline=None, max_examples=60)
@given(st.lists(WORKS, max_size=8))
def test_the_peak_is_that_of_counting_step_by_step(works: list[LineWork]) -> None:
    assert peak(works) == step_by_step(works)


@settings(deadline=None, max_examples=60)
@given(st.lists(ENGINES, max_size=3, unique_by=lambda e: e.id), queues(), st.integers(0, 20))
def test_what_starts_fits_and_starts_once(
    engines: list[EngineCapacity], waiting: list[LineQueue], most: int
) -> None:
    starts = admit(engines, waiting, most)
    assert len(starts) <= most
    assert len({(start.batch, start.number) for start in starts}) == len(starts)
    lines = {(q.batch, line.number): line for q in waiting for line in q.lines}
    for engine in engines:
        new = [lines[s.batch, s.number].work for s in starts if s.engine == engine.id]
        if not new:
            continue
        assert engine.waiting == 0
        there = [line.work for line in engine.lines if not line.ended]
        everything = there + new
        if len(everything) > 1:
            assert peak(everything) <= engine.capacity
            assert sum(work.sequences for work in everything) <= engine.places


@settings(deadline=None, max_examples=60)
@given(st.lists(ENGINES, max_size=3, unique_by=lambda e: e.id), queues(), st.integers(0, 20))
def test_a_batchs_lines_start_in_their_order(
    engines: list[EngineCapacity], waiting: list[LineQueue], most: int
) -> None:
    for queue in waiting:
        started = [s.number for s in admit(engines, waiting, most) if s.batch == queue.batch]
        assert started == [line.number for line in queue.lines[: len(started)]]


@settings(deadline=None, max_examples=60)
@given(queues())
def test_an_engine_with_nothing_to_do_always_takes_a_line(waiting: list[LineQueue]) -> None:
    tiny = idle(capacity=1, places=1)
    assert bool(admit([tiny], waiting, 1)) == any(queue.lines for queue in waiting)


@pytest.mark.parametrize(
    "busy",
    [
        idle(waiting=1),
        idle(running=12),
        idle(running=3, used=450),
    ],
    ids=["a queue", "no places", "no memory"],
)
def test_nothing_starts_beside_online_requests_that_need_the_room(busy: EngineCapacity) -> None:
    assert admit([busy], [a_queue(LineWork(20, 20))], 9) == []


def test_places_and_memory_are_left_for_online_requests_to_come() -> None:
    lines = [LineWork(1, 1)] * 20
    assert len(admit([idle()], [a_queue(*lines)], 99)) == 12
    assert len(admit([idle(running=2)], [a_queue(*lines)], 99)) == 10
    assert len(admit([idle()], [a_queue(*[LineWork(90, 10)] * 20)], 99)) == 9


def test_lines_that_have_ended_since_the_measurement_are_not_taken_for_online_requests() -> None:
    gone = tuple(InFlightLine(LineWork(40, 1), measured=True, ended=True) for _ in range(12))
    engine = idle(running=12, used=480, lines=gone)
    assert len(admit([engine], [a_queue(*[LineWork(5, 5)] * 20)], 99)) == 12


def test_a_long_line_is_not_overtaken_by_short_ones_for_ever() -> None:
    engine = idle(lines=(InFlightLine(LineWork(400, 100), measured=True),), running=1, used=400)
    long = a_queue(LineWork(500, 100), batch="long")
    short = a_queue(LineWork(5, 5), batch="short", served=1)
    assert admit([engine], [long, short], 9) == []
    assert [s.batch for s in admit([engine], [short], 9)] == ["short"]


def test_keys_share_alike_and_so_do_a_keys_batches() -> None:
    lines = [LineWork(10, 10)] * 50
    waiting = [
        a_queue(*lines, owner="alice", batch="a1"),
        a_queue(*lines, owner="alice", batch="a2"),
        a_queue(*lines, owner="bob", batch="b1"),
    ]
    starts = admit([idle(places=64, capacity=10_000)], waiting, 40)
    assert Counter(start.batch for start in starts) == {"a1": 10, "a2": 10, "b1": 20}


def test_of_a_keys_batches_those_that_would_be_late_go_first_by_deadline() -> None:
    lines = [LineWork(10, 10)] * 5
    waiting = [
        a_queue(*lines, batch="calm", deadline_s=1),
        a_queue(*lines, batch="late", deadline_s=60, late=True),
        a_queue(*lines, batch="later", deadline_s=90, late=True),
    ]
    starts = admit([idle(places=64, capacity=10_000)], waiting, 12)
    assert [s.batch for s in starts] == ["late"] * 5 + ["later"] * 5 + ["calm"] * 2


def test_lines_spread_over_engines_by_what_is_free() -> None:
    small, large = idle(id="small", capacity=500), idle(id="large", capacity=4000)
    starts = admit([small, large], [a_queue(*[LineWork(50, 50)] * 10)], 99)
    assert Counter(start.engine for start in starts)["large"] > 6


def test_who_comes_late_has_no_claim_to_the_past() -> None:
    counters = TokenCounters()
    counters.join("a", [])
    counters.add("a", 500)
    counters.join("b", ["a"])
    assert counters.of("b") == 500
    counters.add("b", 100)
    counters.join("b", ["a"])
    assert counters.of("b") == 600
    counters.forget("b")
    counters.join("b", [])
    assert counters.of("b") == 0


def test_lengths_are_the_bounds_until_enough_lines_have_finished() -> None:
    lengths = LineLengths()
    line = BatchLine(1, "c", "m", 0, 400, 100, 1)
    assert lengths.predict(line, 1000).tokens == 100
    assert lengths.predict(line, 1000).prompt >= 400 / 4
    for tokens in (8, 12) * 4:
        lengths.finished(line, 50, tokens)
    seen = lengths.predict(line, 1000)
    assert (seen.prompt, seen.tokens) == (50, 10)
    assert 12 < seen.high < 20
    unbounded = BatchLine(2, "d", "m", 0, 8000, None, 1)
    assert lengths.predict(unbounded, 1000).prompt == 1000


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 500), min_size=8, max_size=40), st.integers(1, 300))
def test_no_prediction_is_beyond_what_a_line_may_generate(seen: list[int], most: int) -> None:
    lengths = LineLengths()
    line = BatchLine(1, "c", "m", 0, 40, most, 1)
    for tokens in seen:
        lengths.finished(line, 10, tokens)
    length = lengths.predict(line, 200)
    assert 0 <= length.tokens <= length.high <= min(most, 200)


def test_the_pace_of_the_last_minutes_says_when_a_batch_is_done() -> None:
    pace = BatchPace(began_s=0)
    assert pace.eta_s(100, 5) is None
    for second in range(1, 11):
        pace.finished(20, second)
    assert pace.eta_s(100, 10) == pytest.approx(5)
    assert pace.eta_s(100, 1000) is None
    assert is_late(80, deadline_s=100, now=0)
    assert not is_late(60, deadline_s=100, now=0)
    assert not is_late(None, deadline_s=0, now=1)


def stats(role: Role = Role.UNIFIED, **changes: object) -> RoutingStats:
    load = ReplicaLoad(running=3, waiting=0, kv_cache_usage=0.5, step_time_s=0.1, measured_at=100.0)
    given = {"load": load, "max_running": 16, "kv_capacity_tokens": 1000, "draining": False,
             "told_at": 0.0}  # fmt: skip
    return RoutingStats.model_validate({**given, "role": role, **changes})


def a_running(engine: str, started_s: float, ended_s: float | None = None) -> RunningLine:
    line = BatchLine(1, "c", "m", 0, 40, 8, 1)
    return RunningLine(line, engine, LineLength(10, 8, 8), started_s, ended_s)


def test_engines_that_drain_are_silent_or_have_not_said_enough_get_nothing() -> None:
    known = {
        "draining": stats(draining=True),
        "silent": stats(load=None),
        "starting": stats(kv_capacity_tokens=None),
        "prefill": stats(Role.PREFILL),
        "good": stats(),
    }
    assert [engine.id for engine in engines(known, [], 101.0)] == ["good"]
    assert engines(known, [], 100.0 + STALE_S + 1) == []
    only = {"prefill": stats(Role.PREFILL)}
    assert [engine.id for engine in engines(only, [], 101.0)] == ["prefill"]


def test_of_its_lines_those_count_as_measured_that_were_there_then() -> None:
    lines = [
        a_running("e", 99.5),
        a_running("e", 100.5),
        a_running("e", 99.0, ended_s=100.6),
        a_running("e", 99.0, ended_s=99.9),
        a_running("other", 99.0),
    ]
    (engine,) = engines({"e": stats()}, lines, 101.0)
    assert (engine.places, engine.capacity, engine.used) == (16, 1000, 500)
    assert [(line.measured, line.ended) for line in engine.lines] == [
        (True, False),
        (False, False),
        (True, True),
    ]
    # One token a step of a tenth of a second, and never more than predicted.
    assert engine.lines[1].work.held == pytest.approx(15)
    assert engine.lines[0].work.held == 18
    assert engine.lines[0].work.left == 1


def test_a_line_that_leaves_alone_shares_its_engine_with_none() -> None:
    here = InFlightLine(LineWork(1, 1), measured=True, batch="other")
    tested = LineQueue("k", "b", 0, 0, 0, False, some_candidates(3), alone=True, most_engines=2)
    others = LineQueue("k", "c", 0, 1, 0, False, some_candidates(3))
    idle = EngineCapacity("idle", 8, 1000, 0, 0, 0)
    busy = EngineCapacity("busy", 8, 1000, 1, 0, 1, (here,))
    assert [(one.batch, one.engine) for one in admit([idle, busy], [tested], 9)] == [("b", "idle")]
    idle_ones = {"idle": idle, "second": EngineCapacity("second", 8, 1000, 0, 0, 0)}
    starts = admit([*idle_ones.values()], [tested, others], 9)
    on = {engine: [one.batch for one in starts if one.engine == engine] for engine in idle_ones}
    # The next of the batch needs an engine of its own, and is not overtaken until it has one.
    assert sorted(on.values()) == [["b"], ["c"]]
    taken = EngineCapacity(
        "taken", 8, 1000, 1, 0, 1, (InFlightLine(LineWork(1, 1), True, batch="b", alone=True),)
    )
    assert admit([taken], [others], 9) == []


def test_a_batch_on_as_many_engines_as_it_may_be_holds_nobody_up() -> None:
    fresh = LineQueue("k", "b", 0, 0, 0, False, some_candidates(20), most_engines=1)
    others = LineQueue("k", "c", 0, 10**9, 0, False, some_candidates(3))
    engines = [EngineCapacity(name, 8, 1000, 0, 0, 0) for name in ("e1", "e2")]
    starts = admit(engines, [fresh, others], 99)
    on = {batch: [one.engine for one in starts if one.batch == batch] for batch in "bc"}
    assert len(set(on["b"])) == 1
    assert len(on["c"]) == 3


def some_candidates(count: int) -> list[BatchCandidate]:
    return [BatchCandidate(number, 2, LineWork(1, 1)) for number in range(count)]
