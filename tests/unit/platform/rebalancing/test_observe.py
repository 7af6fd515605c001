"""The snapshot of a fleet, from reports that are made up and rates that are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.config import Device
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.rates import Rates, sums_of
from loomserve.platform.placement.policy.device_times import (
    DeviceProfile,
    MeasuredDevice,
    MeasuredLink,
)
from loomserve.platform.rebalancing.observe import PROFILE, measured
from loomserve.platform.rebalancing.policy.actions import Move
from loomserve.platform.rebalancing.policy.limits import unable
from loomserve.platform.rebalancing.policy.measured import Measured, Unfit, flaws
from loomserve.platform.rebalancing.policy.snapshot import MoveKind, Snapshot
from loomserve.platform.state import (
    FootprintState,
    Pace,
    ReplicaLoad,
    SchedulingState,
    ShardState,
    StageState,
    WorkState,
)
from tests.unit.platform.fleet.heartbeats import COLD, DEVICES, HOT, MODEL, borrowing, loan, report

MIB = 2**20
NOW = 1_000_000.0
PROFILED = DeviceProfile(
    measured_at="1970-01-12T13:00:00+00:00",
    devices=tuple(
        MeasuredDevice(
            name=name, place="", memory=8 * 2**30, bytes_per_s=speed, flop_per_s=1, itemsize=4
        )
        for name, speed in (("core0", 2e9), ("core1", 1e9))
    ),
    links=(
        MeasuredLink(
            source="core0", target="core1", latency_s=1e-5, bytes_per_s=3e9, measured=True
        ),
    ),
)  # fmt: skip


def load(at_s: float, since_s: float, **changes: object) -> ReplicaLoad:
    """Of an engine with a tenth of its time for prompts, two for attention, three for the rest."""
    values: dict[str, object] = {
        "running": 4, "waiting": 0, "kv_cache_usage": 0.5, "step_time_s": 0.04,
        "work": WorkState(prefill_s=0.1 * since_s, attention_s=0.2 * since_s,
                          linear_s=0.3 * since_s, tokens=int(100 * since_s)),
        "measured_at": at_s,
    }  # fmt: skip
    return ReplicaLoad.model_validate({**values, **changes})


def footprint(**changes: object) -> FootprintState:
    values: dict[str, object] = {
        "layers": 30, "layer_bytes": 3 * MIB, "kv_heads": 3, "block_bytes": MIB,
        "block_tokens": 32, "memory_bytes": 2 * 2**30, "memory_measured_at": NOW - 1,
        "start_s": 20.0, "ready_at": NOW - 500,
    }  # fmt: skip
    return FootprintState.model_validate({**values, **changes})


def with_(of: Heartbeat, measured: ReplicaLoad, made: FootprintState | None) -> Heartbeat:
    stats = of.stats.model_copy(update={"load": measured})
    return of.model_copy(update={"stats": stats, "footprint": made})


def told(of: Heartbeat, at_s: float) -> Heartbeat:
    """Told at this time of its own clock, which the controller's shows, too."""
    return of.model_copy(update={"stats": of.stats.model_copy(update={"told_at": at_s})})


def seen(
    *reports: Heartbeat,
    profile: DeviceProfile | None = PROFILED,
    made: FootprintState | None = None,
    devices: tuple[Device, ...] = DEVICES,
    limits: Mapping[str, int] | None = None,
    seconds: float = 10.0,
    **changes: object,
) -> Measured:
    """What is seen of these replicas after they have worked for a while."""
    fleet = Fleet(devices, drain_timeout_s=60)
    for model in {each.model.name: each.model for each in reports}.values():
        fleet.registry.add(model, 1)
    for step in (0.0, seconds):
        for each in reports:
            at_s = NOW - seconds + step
            given = with_(each, load(at_s, step, **changes), made or footprint())
            assert sums_of(given) is not None
            fleet.report(told(given, at_s), at_s)
    for lender, most in (limits or {}).items():
        fleet.loans.limit("h0", lender, most)
    return now_measured(fleet, profile, devices)


def now_measured(
    fleet: Fleet,
    profile: DeviceProfile | None = PROFILED,
    devices: tuple[Device, ...] = DEVICES,
) -> Measured:
    return measured(fleet, devices, profile, at_s=NOW, monotonic_s=NOW, changed_at_s=0)


def snapshot(measured: Measured) -> Snapshot:
    assert measured.snapshot is not None, measured.missing
    assert not flaws(measured.snapshot, Rebalancing())
    return measured.snapshot


def test_an_engine_is_its_work_a_second_its_kv_and_its_memory() -> None:
    whole = snapshot(seen(report("r0")))
    (engine,) = whole.engines
    assert (engine.prefill, engine.attention, engine.linear) == pytest.approx((0.1, 0.2, 0.3))
    assert engine.kv_bytes == MODEL.kv_cache_memory
    assert engine.kv_used_bytes == MODEL.kv_cache_memory // 2
    assert engine.kv_growth == pytest.approx(100 * MIB / 32)
    assert (engine.layers, engine.heads, engine.layer_bytes) == (30, 3, 3 * MIB)
    assert engine.movable == frozenset()
    assert [device.allocated_bytes for device in whole.devices] == [2 * 2**30, 0]
    assert [device.speed for device in whole.devices] == [1.0, 0.5]
    (link,) = whole.links
    assert (link.bytes_per_s, link.measured_at_s) == (3e9, 997_200)


def test_layers_move_between_cores_and_not_between_gpus() -> None:
    gpus = tuple(Device(name=f"core{at}", kind="cuda", gpu=at) for at in range(2))
    reports = borrowing(loan("c1")), report("c1", "core1", model=COLD)
    layers = Move(kind=MoveKind.LAYERS, engine="h0", lender="c1", amount=1)
    for devices, kinds in ((DEVICES, {*MoveKind}), (gpus, {*MoveKind} - {MoveKind.LAYERS})):
        found = snapshot(seen(*reports, devices=devices))
        assert all(engine.movable == kinds for engine in found.engines)
        refusal = unable(found, layers, Rebalancing())
        only = refusal is not None and "layers move between CPU devices only" in refusal.detail
        assert only == (devices is gpus)


def test_what_waits_asks_for_as_much_as_what_runs() -> None:
    (engine,) = snapshot(seen(report("r0"), waiting=8)).engines
    assert engine.compute == pytest.approx(3 * 0.6)
    assert (engine.queue, engine.waiting, engine.max_running) == (12, 8, 8)


def test_a_replicas_kv_is_computed_again_at_the_pace_of_its_prompts_or_loaded() -> None:
    (engine,) = snapshot(seen(report("r0"))).engines
    assert (engine.recompute_s, engine.stores_kv, engine.draining) == (None, False, False)
    pace = Pace(prefill_token_s=0.002, output_token_s=0.05, request_s=3.0)
    stored = SchedulingState(
        queue="fcfs", preemption="recompute", swapped_out=0, swapped_in=0, recomputed=0,
        swap_used_bytes=0, swap_capacity_bytes=0, step_time_error=None, swap_time_error=None,
    )  # fmt: skip
    (engine,) = snapshot(seen(report("r0", draining=True), pace=pace, scheduling=stored)).engines
    assert engine.recompute_s == pytest.approx(0.002 * 32 / MIB)
    assert (engine.stores_kv, engine.draining) == (True, True)


def test_a_loan_is_what_lies_there_and_what_the_lender_computed_for_it() -> None:
    hot = borrowing(loan("c1"))
    whole = snapshot(seen(hot, report("c1", "core1", model=COLD)))
    (lent,) = whole.loans
    assert (lent.engine, lent.lender, lent.kind) == ("h0", "c1", MoveKind.REQUESTS)
    assert lent.amount == lent.kv_bytes == 3 * MIB
    assert whole.engine("h0").kv_used_bytes == 7 * MIB
    assert whole.engine("h0").borrow_bytes == HOT.lending.borrow_memory  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("part", "away", "weights"),
    [({"heads": 2}, 2 / 3, 0), ({"layers": (10, 20)}, 1 / 3, 10 * 3 * MIB)],
)
def test_of_blocks_in_use_each_side_has_its_share_while_a_part_is_away(
    part: dict[str, Any], away: float, weights: int
) -> None:
    state = ShardState(**part, phase="away", pause_s=0.1, copied_bytes=0)
    hot = borrowing(loan("c1").model_copy(update={"shard": state}))
    whole = snapshot(seen(hot, report("c1", "core1", model=COLD)))
    (lent,), used = whole.loans, 7 * MIB
    assert (lent.kv_bytes, lent.weights_bytes) == (int(used * away), weights)
    engine = whole.engine("h0")
    assert engine.kv_used_bytes == pytest.approx(used * (1 - away), abs=1)
    assert (engine.heads, engine.layers) == (3 - part.get("heads", 0), 30 - 10 * ("layers" in part))


def test_requests_can_be_sent_only_where_a_plan_has_set_a_limit() -> None:
    reports = borrowing(loan("c1")), report("c1", "core1", model=COLD)
    assert snapshot(seen(*reports)).engine("h0").lenders == frozenset()
    limited = snapshot(seen(*reports, limits={"org/cold": 0}))
    assert limited.engine("h0").lenders == {"c1"}


def test_a_pipelines_work_and_memory_lie_on_its_devices_by_layers() -> None:
    stages = (StageState(device="core0", layers=10), StageState(device="core1", layers=20))
    whole = snapshot(seen(report("r0", stages=stages)))
    assert [engine.device for engine in whole.engines] == ["core0", "core1"]
    # Its requests cannot leave one of them.
    assert [engine.max_running for engine in whole.engines] == [0, 0]
    assert [engine.compute for engine in whole.engines] == pytest.approx([0.2, 0.4])
    assert sum(device.allocated_bytes for device in whole.devices) == pytest.approx(2**31, abs=2)


def test_one_more_replica_of_a_model_would_be_without_work() -> None:
    fleet = Fleet(DEVICES, drain_timeout_s=60)
    fleet.registry.add(MODEL, 1)
    for at_s in (0.0, 10.0):
        for each in (report("r0"), report("r1", "core1")):
            given = with_(each, load(NOW - 10 + at_s, at_s), footprint())
            fleet.report(told(given, NOW - 10 + at_s), NOW - 10 + at_s)
    fleet.registry.set_target("org/m", 2)
    whole = snapshot(now_measured(fleet))
    (model,) = whole.models
    assert model.replica is not None
    assert (model.replica.compute, model.replica.kv_used_bytes, model.start_s) == (0, 0, 20)


@pytest.mark.parametrize(
    ("measured", "part"),
    [
        (seen(report("r0"), profile=None), PROFILE),
        (seen(report("r0"), devices=(*DEVICES, Device(name="new", cores=(2,)))), "new"),
        (seen(report("r0"), seconds=2.0), "r0"),
    ],
)
def test_where_anything_would_have_to_be_made_up_there_is_no_snapshot(
    measured: Measured, part: str
) -> None:
    assert measured.snapshot is None
    (flaw,) = measured.missing
    assert flaw.why is Unfit.PARTIAL
    assert part in flaw.subject


def test_an_engine_without_measurements_has_no_sums() -> None:
    assert sums_of(report("r0")) is None


def test_a_model_whose_replicas_are_missing_makes_the_snapshot_partial() -> None:
    fleet = Fleet(DEVICES, drain_timeout_s=60)
    fleet.registry.add(MODEL, 2)
    found = now_measured(fleet)
    assert found.snapshot is not None
    assert [each.why for each in flaws(found.snapshot, Rebalancing())] == [Unfit.PARTIAL]


@given(
    st.lists(st.tuples(st.floats(0.5, 5), st.floats(0, 10)), min_size=3, max_size=40),
)
def test_a_rate_is_the_growth_over_the_time_that_it_took(steps: list[tuple[float, float]]) -> None:
    rates, at_s, total = Rates(8.0), 0.0, 0.0
    history = []
    for step_s, grown in steps:
        at_s, total = at_s + step_s, total + grown
        rates.take("e", at_s, {"work": total})
        history.append((at_s, total))
    rate = rates.of("e")
    if rate is None:
        assert at_s - history[0][0] < 4
    else:
        spans = [(at_s - then_s, total - before) for then_s, before in history[:-1]]
        # The shortest that is no shorter than the window, or all that there is.
        span_s, grown = min((s for s in spans if s[0] >= 8), default=max(spans))
        assert rate["work"] == pytest.approx(grown / span_s)


def test_a_sum_that_began_anew_counts_from_nothing() -> None:
    rates = Rates(10.0)
    rates.take("e", 0, {"old": 50.0})
    rates.take("e", 10, {"old": 5.0, "new": 20.0})
    assert rates.of("e") == {"old": 0.5, "new": 2.0}
    rates.keep(())
    assert rates.of("e") is None
