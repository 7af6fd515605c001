"""Rebalancing beside its planner and protocol: loads, heat, forecasts, corrections, plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.plans import (
    ActionRecord,
    AnyRecord,
    Plan,
    PlanStatus,
    ReplicasRecord,
    RequestsRecord,
    RoleRecord,
    RunningRecord,
    ShardRecord,
    StepStatus,
    plan_of,
    spread,
)
from loomserve.platform.rebalancing.plans.reports import EventKind
from loomserve.platform.rebalancing.policy.actions import ActionKind, Move
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import (
    MOST,
    Corrections,
    Forecast,
    forecast,
    tpot_ratio,
)
from loomserve.platform.rebalancing.policy.heat import Heat, Level, classify
from loomserve.platform.rebalancing.policy.snapshot import MoveKind, Snapshot
from loomserve.platform.state.roles import Role
from tests.unit.platform.rebalancing.fleets import GIB, MIB, OPTIONS, fleet, proposed

TWO = fleet([(0.9, 0.75), (0.1, 0.25)])


def test_utilisation_is_compute_asked_for_and_memory_in_use() -> None:
    # 2 GiB of 4 are allocated, of which a quarter and three quarters of a GiB of KV lie idle.
    assert TWO.loads == pytest.approx({"d0": 0.9 + 1.75 / 4, "d1": 0.1 + 1.25 / 4})


def test_what_leaves_a_device_arrives_on_the_other_and_comes_back_the_same() -> None:
    for kind, amount in ((MoveKind.REQUESTS, 100 * MIB), (MoveKind.HEADS, 1), (MoveKind.LAYERS, 3)):
        out = Move(kind=kind, engine="m0", lender="m1", amount=amount)
        there = apply(TWO, out)
        assert sum(there.loads.values()) == pytest.approx(sum(TWO.loads.values()))
        assert there.loads["d0"] < TWO.loads["d0"]
        back = apply(there, out.model_copy(update={"back": True}))
        assert back.loans == ()
        assert back.loads == pytest.approx(TWO.loads)
        for before, after in zip(TWO.engines, back.engines, strict=True):
            assert (before.layers, before.heads, before.kv_bytes, before.kv_used_bytes) == (
                (after.layers, after.heads, after.kv_bytes, after.kv_used_bytes)
            )


def test_a_device_of_half_the_speed_is_busy_twice_as_long() -> None:
    slow = replace(TWO, devices=(TWO.devices[0], replace(TWO.devices[1], speed=0.5)))
    after = apply(slow, Move(kind=MoveKind.LAYERS, engine="m0", lender="m1", amount=10))
    assert after.engine("m0").compute == pytest.approx(0.6)
    assert after.loans[0].compute == pytest.approx(0.6)


def test_what_leaves_makes_room_for_more_blocks_which_are_smaller() -> None:
    assert TWO.kv_room(TWO.engine("m0")) == GIB
    after = apply(TWO, Move(kind=MoveKind.LAYERS, engine="m0", lender="m1", amount=10))
    # The memory of the weights is KV memory now.
    assert after.kv_room(after.engine("m0")) == pytest.approx(1.5 * (GIB + 80 * MIB))
    assert after.idle_kv(after.engine("m0")) - TWO.idle_kv(TWO.engine("m0")) == pytest.approx(
        0.25 * GIB + 80 * MIB
    )
    assert after.device("d1").allocated_bytes == 2 * GIB + 80 * MIB
    assert after.device("d0").allocated_bytes == 2 * GIB
    after = apply(TWO, Move(kind=MoveKind.HEADS, engine="m0", lender="m1", amount=2))
    assert after.kv_room(after.engine("m0")) == pytest.approx(2 * GIB)


def test_there_are_no_more_blocks_than_the_engine_has_numbers_for() -> None:
    after = apply(TWO, Move(kind=MoveKind.HEADS, engine="m0", lender="m1", amount=3))
    # Four times as many would fit.
    assert after.kv_room(after.engine("m0")) == GIB + TWO.engine("m0").borrow_bytes


def test_parts_take_the_place_of_loans_of_whole_requests() -> None:
    borrows = replace(TWO.engine("m0"), borrowed=(("m1", GIB), ("m2", GIB // 2)))
    with_loans = replace(TWO, engines=(borrows, TWO.engine("m1")))

    def room(kind: MoveKind, amount: int) -> float:
        move = Move(kind=kind, engine="m0", lender="m1", amount=amount)
        after = apply(with_loans, move)
        return after.kv_room(after.engine("m0"))

    assert with_loans.kv_room(borrows) == 2.5 * GIB
    assert room(MoveKind.REQUESTS, MIB) == 2.5 * GIB
    assert room(MoveKind.HEADS, 2) == pytest.approx(2.5 * GIB)
    assert room(MoveKind.LAYERS, 10) == pytest.approx(1.5 * (GIB + 80 * MIB))


def moved(kind: MoveKind, amount: int, snapshot: Snapshot = TWO) -> Forecast:
    move = Move(kind=kind, engine="m0", lender="m1", amount=amount)
    return forecast(snapshot, apply(snapshot, move), move, "d0", "d1")


def test_a_move_costs_its_bytes_over_the_bandwidth_and_the_halt() -> None:
    halt_s, latency_s = 0.004, 1e-5
    heads, layers = moved(MoveKind.HEADS, 1), moved(MoveKind.LAYERS, 10)
    assert heads.cost_s == pytest.approx(0.1875 * GIB / 2e9 + halt_s + latency_s)
    assert layers.cost_s == pytest.approx((0.25 * GIB + 80 * MIB) / 2e9 + halt_s + latency_s)
    # Copied beforehand, but for what grows meanwhile.
    assert halt_s < heads.pause_s < halt_s + 3 * latency_s
    assert heads.duration_s > heads.cost_s


def test_kv_that_grows_as_fast_as_it_is_copied_makes_the_pause_long() -> None:
    engines = tuple(replace(each, kv_growth=8e9) for each in TWO.engines)
    assert moved(MoveKind.HEADS, 1, replace(TWO, engines=engines)).pause_s > 0.1


def test_gain_counts_how_far_apart_they_are_whichever_is_ahead() -> None:
    even = fleet([(0.5, 0.5), (0.5, 0.5)])
    assert moved(MoveKind.LAYERS, 20, even).gain < 0


def test_time_per_token_grows_by_round_trips_and_by_what_guests_take() -> None:
    after = apply(TWO, Move(kind=MoveKind.LAYERS, engine="m0", lender="m1", amount=15))
    borrowers = 0.45
    assert tpot_ratio(TWO, after, "m1") == pytest.approx(1 / (1 - borrowers))
    home, there = TWO.engine("m0"), TWO.engine("m1").compute
    # The lender's own work is in the way of half of the step, and of a quarter of its attention.
    waits = 1 / (1 - there) - 1
    assert tpot_ratio(TWO, after, "m0") == pytest.approx(1 + waits / 2 + 2e-5 / 0.05)
    after = apply(TWO, Move(kind=MoveKind.HEADS, engine="m0", lender="m1", amount=1))
    share = home.attention / 4 / home.compute
    assert tpot_ratio(TWO, after, "m0") == pytest.approx(1 + waits * share + 30 * 2e-5 / 0.05)


def test_a_lender_whose_device_is_taken_is_never_done() -> None:
    busy = replace(TWO, engines=tuple(
        replace(each, linear=1.0) if each.id == "m1" else each for each in TWO.engines
    ))  # fmt: skip
    after = apply(busy, Move(kind=MoveKind.LAYERS, engine="m0", lender="m1", amount=1))
    assert tpot_ratio(busy, after, "m0") == math.inf


LOADS = st.lists(st.floats(0, 2), min_size=2, max_size=5)
HYSTERESIS = Rebalancing(rising=0.5, falling=0.1, confirm_periods=1)


@settings(max_examples=60)
@given(LOADS, st.lists(st.lists(st.floats(-0.099, 0.099), min_size=5, max_size=5), min_size=10))
def test_noise_on_a_constant_load_changes_each_device_once_at_most(
    loads: list[float], noise: list[list[float]]
) -> None:
    heat: dict[str, Heat] = {}
    levels: list[list[Level]] = [[] for _ in loads]
    for off in noise:
        seen = {str(at): load + off[at] for at, load in enumerate(loads)}
        heat = classify(heat, seen, HYSTERESIS)
        for at, of in enumerate(levels):
            of.append(heat[str(at)].level)
    for of in levels:
        changes = sum(a is not b for a, b in zip([Level.EVEN, *of], of, strict=False))
        assert changes <= 1


def test_a_device_turns_hot_only_once_enough_looks_agree() -> None:
    options = Rebalancing(confirm_periods=3)
    hot, even = {"a": 1.0, "b": 0.3}, {"a": 0.5, "b": 0.3}
    heat: dict[str, Heat] = {}
    seen = []
    for loads in (hot, hot, even, hot, hot, hot):
        heat = classify(heat, loads, options)
        seen.append(heat["a"].level)
    assert seen == [*[Level.EVEN] * 5, Level.HOT]
    assert heat["b"].level is Level.COLD
    # It remains so down to falling, whatever rising is.
    for _ in range(5):
        heat = classify(heat, {"a": 0.55, "b": 0.3}, options)
    assert heat["a"].level is Level.HOT
    for _ in range(3):
        heat = classify(heat, even, options)
    assert (heat["a"].level, heat["b"].level) == (Level.EVEN, Level.EVEN)


def test_devices_that_left_are_forgotten() -> None:
    heat = classify({"gone": Heat(level=Level.HOT)}, {"a": 0.0, "b": 0.0}, OPTIONS)
    assert set(heat) == {"a", "b"}


SECONDS = st.floats(0, 100)
FORECASTS = st.builds(
    Forecast,
    gain=st.floats(-2, 2),
    cost_s=SECONDS,
    pause_s=SECONDS,
    duration_s=SECONDS,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(FORECASTS, FORECASTS), max_size=20))
def test_corrections_stay_within_their_bounds_and_survive_a_restart(
    seen: list[tuple[Forecast, Forecast]],
) -> None:
    corrections = Corrections()
    for predicted, real in seen:
        corrections = corrections.learn(ActionKind.HEADS, "a", "b", predicted, real)
    factors = corrections.of(ActionKind.HEADS, "a", "b")
    for factor in factors.model_dump().values():
        assert 1 / MOST * 0.999 <= factor <= MOST * 1.001
    assert Corrections.model_validate_json(corrections.model_dump_json()) == corrections
    assert corrections.of(ActionKind.HEADS, "b", "a").cost_s == 1


def test_corrections_come_to_what_is_measured() -> None:
    predicted = Forecast(gain=0.4, cost_s=1, pause_s=0.01, duration_s=2)
    real = Forecast(gain=0.2, cost_s=3, pause_s=0.02, duration_s=2)
    corrections = Corrections()
    for _ in range(30):
        corrections = corrections.learn(ActionKind.LAYERS, "a", "b", predicted, real)
    corrected = corrections.of(ActionKind.LAYERS, "a", "b")(predicted)
    assert corrected.model_dump() == pytest.approx(real.model_dump(), rel=1e-3)


def made(id_: str) -> Plan:
    plan = plan_of(id_, 1_000.0, TWO, proposed(TWO))
    assert plan is not None
    return plan


REAL = Forecast(gain=0.5, cost_s=1.0, pause_s=0.01, duration_s=1.0)


def started(id_: str) -> History:
    return History().propose(made(id_), 1.0).history.start(id_, 2.0).history


def test_a_plan_is_carried_out_step_by_step_and_its_gain_is_measured() -> None:
    history, after = started("p1"), proposed(TWO).after
    steps = len(history.plan("p1").steps)
    for at in range(steps):
        assert history.plan("p1").next_step == at
        done = history.step_done("p1", 3.0, REAL, after)
        assert (done.event.kind, done.event.step) == (EventKind.DONE, at)
        history = done.history
    plan = history.plan("p1")
    assert (plan.status, plan.next_step) == (PlanStatus.DONE, None)
    assert all(each.real == REAL for each in plan.steps)
    assert history.corrections != Corrections()
    assert history.plan("p1").real_gain == pytest.approx(plan.predicted.gain)
    assert History.model_validate_json(history.model_dump_json()) == history


def test_what_actuators_remember_is_read_back_as_it_was_written() -> None:
    shard: dict[str, Any] = {"layers": [20, 30]}
    records: list[AnyRecord] = [
        ActionRecord(name="p1/0"),
        RequestsRecord(
            name="p1/0", borrower="a", lender="b", limit=7, limit_before=None, bytes_before=9
        ),
        RunningRecord(name="p1/0", engine="a", to="b", requests=4),
        RoleRecord(name="p1/0", replica="a", role=Role.PREFILL, role_before=Role.UNIFIED),
        ReplicasRecord(
            name="p1/0", model="m", replicas=2, replicas_before=1, there_before=("a",), leaving=None
        ),
        ShardRecord(
            name="p1/0", engine="a", lender="b", device="d1", shard=shard, shard_before=None
        ),
    ]
    for record in records:
        history = started("p1").step_begun("p1", 3.0, record, {}).history
        read = History.model_validate_json(history.model_dump_json())
        assert read == history
        assert type(read.plan("p1").steps[0].record) is type(record)


def test_a_step_that_fails_ends_its_plan() -> None:
    failed = started("p1").step_failed("p1", 3.0, "the lender died")
    assert (failed.event.kind, failed.changes_loads) == (EventKind.FAILED, False)
    plan = failed.history.plan("p1")
    assert plan.status is PlanStatus.FAILED
    assert plan.steps[0].status is StepStatus.FAILED
    assert all(each.status is StepStatus.LEFT for each in plan.steps[1:])
    with pytest.raises(Conflict):
        failed.history.step_done("p1", 4.0, REAL)


def test_a_new_plan_replaces_one_that_waits_and_not_one_that_runs() -> None:
    history = History(most=2).propose(made("p1"), 1.0).history.propose(made("p2"), 2.0).history
    assert history.plan("p1").status is PlanStatus.REPLACED
    with pytest.raises(Conflict):
        history.start("p1", 3.0)
    history = history.start("p2", 3.0).history
    with pytest.raises(Conflict):
        history.propose(made("p3"), 4.0)
    history = history.abort("p2", 4.0).history.propose(made("p3"), 5.0).history
    assert [plan.id for plan in history.plans] == ["p2", "p3"]
    with pytest.raises(NotFound):
        history.plan("p1")
    with pytest.raises(Conflict):
        history.abort("p2", 6.0)


def test_no_actions_make_no_plan_and_a_plan_tells_what_it_predicts() -> None:
    even = fleet([(0.5, 0.5), (0.5, 0.5)])
    assert plan_of("p", 0.0, even, proposed(even)) is None
    plan = made("p")
    assert plan.predicted.gain == pytest.approx(spread(TWO) - spread(proposed(TWO).after))
    assert plan.predicted.cost_s == pytest.approx(sum(x.predicted.cost_s for x in plan.steps))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_bare_off_of_yaml_means_off() -> None:
    assert Rebalancing.model_validate({"controller": False}).controller == "off"
    assert Rebalancing(controller="auto").controller == "auto"
    with pytest.raises(ValidationError, match="falling must be less"):
        Rebalancing(rising=0.2, falling=0.2)
    with pytest.raises(ValidationError):
        Rebalancing.model_validate({"controller": True})
