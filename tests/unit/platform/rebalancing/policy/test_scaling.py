"""How many replicas a model should have: tables, and properties over loads that are made up."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.config import Scaling
from loomserve.platform.fleet.snapshot import FleetModel
from loomserve.platform.rebalancing.policy.scaling import (
    ROOM,
    ScalingLook,
    ScalingReason,
    ScalingWatch,
    ScalingWish,
    carried_out,
    leaves,
    load_of,
    look,
    quiet_time_s,
)
from tests.unit.platform.rebalancing.policy.scaled_models import MadeUpService, replica, scaled

REQUESTS = {"target_ongoing_requests": 10}


def looked(model: FleetModel, seconds: float, watch: ScalingWatch | None = None) -> ScalingLook:
    """The last of a look a second at a model that stays as it is."""
    seen = look(watch or ScalingWatch(), model, 0.0)
    for second in range(1, int(seconds) + 1):
        seen = look(seen.watch, model, float(second))
    return seen


@pytest.mark.parametrize(
    ("rules", "busy", "load", "reason"),
    [
        ({}, {}, 0.0, ScalingReason.REQUESTS),
        (REQUESTS, {"running": 8, "waiting": 7}, 1.5, ScalingReason.REQUESTS),
        # As many as the engine runs at once, where nothing else is said.
        ({}, {"running": 10, "waiting": 5}, 1.5, ScalingReason.REQUESTS),
        # One that has only just come waits, too, and says nothing.
        ({}, {"running": 2, "waiting": 1}, 0.3, ScalingReason.REQUESTS),
        # For long it waits only for memory.
        ({}, {"running": 2, "waiting": 1, "oldest_waiting_s": 3.0}, 1.5, ScalingReason.REQUESTS),
        ({}, {"running": 4, "kv_share": 0.99}, 1.1, ScalingReason.KV_MEMORY),
        ({"ttft_slo_ms": 500}, {"running": 4, "oldest_waiting_s": 0.6, "waiting": 1},
         1.2, ScalingReason.TTFT),
        ({"tpot_slo_ms": 50}, {"running": 4, "step_time_s": 0.1}, 2.0, ScalingReason.TPOT),
        # A request that is alone gets no faster.
        ({"tpot_slo_ms": 50}, {"running": 1, "step_time_s": 0.1}, 1.0, ScalingReason.TPOT),
        # The last step's time, of an engine that has nothing to do.
        ({"tpot_slo_ms": 50}, {"step_time_s": 0.1}, 0.0, ScalingReason.REQUESTS),
    ],
    ids=str,
)  # fmt: skip
def test_load_is_counted_in_replicas_of_what_is_scarcest(
    rules: dict[str, Any], busy: dict[str, Any], load: float, reason: ScalingReason
) -> None:
    found, why = load_of(scaled(replica(**busy), rules=rules))
    assert found == pytest.approx(load)
    assert why is reason


def test_more_are_wanted_once_the_load_has_been_too_much_for_the_delay() -> None:
    model = scaled(replica(running=10, waiting=6), rules={**REQUESTS, "upscale_delay_s": 2})
    assert looked(model, 1).wish is None
    wish = looked(model, 2).wish
    assert wish is not None
    assert (wish.replicas, wish.reason, wish.short_s) == (2, ScalingReason.REQUESTS, 2.0)
    assert "1.6" in wish.why


def test_one_decision_at_most_doubles_what_serves_and_keeps_within_bounds() -> None:
    many = scaled(replica(running=10, waiting=190), rules={**REQUESTS, "max": 16})
    wish = looked(many, 5).wish
    assert wish is not None
    assert wish.replicas == 2
    full = scaled(*(replica(n, running=10, waiting=90) for n in range(4)), rules=REQUESTS)
    assert looked(full, 50).wish is None


def test_there_are_no_more_replicas_than_requests() -> None:
    slow = scaled(
        *(replica(n, running=1, oldest_waiting_s=9.0) for n in range(2)), rules={"ttft_slo_ms": 100}
    )
    assert load_of(slow)[0] == pytest.approx(180)
    assert looked(slow, 10).wish is None


def test_a_load_that_grows_is_met_before_it_is_there() -> None:
    watch, wish = ScalingWatch(), None
    for second in range(20):
        model = scaled(replica(running=2 + second), rules={"target_ongoing_requests": 20})
        seen = look(watch, model, float(second))
        watch, wish = seen.watch, wish or seen.wish
        if wish is not None:
            break
    assert wish is not None
    assert (wish.replicas, wish.reason) == (2, ScalingReason.PREDICTED)
    assert seen.load < 1


def test_a_load_that_will_have_gone_when_a_replica_could_be_there_starts_none() -> None:
    watch = ScalingWatch()
    for second in range(8):
        busy = replica(running=10, waiting=35 - 5 * second)
        seen = look(watch, scaled(busy, rules={**REQUESTS, "upscale_delay_s": 5}), float(second))
        watch = seen.watch
        assert seen.wish is None
    # The same load without its end in sight.
    stays = scaled(replica(running=10, waiting=15), rules={**REQUESTS, "upscale_delay_s": 5})
    assert looked(stays, 8).wish is not None


def test_fewer_are_enough_only_after_a_whole_quiet_time() -> None:
    two = (replica(0, running=3), replica(1, running=3))
    model = scaled(*two, rules={**REQUESTS, "downscale_delay_s": 30})
    assert quiet_time_s(model) == 30
    assert looked(model, 29).wish is None
    wish = looked(model, 30).wish
    assert wish is not None
    assert (wish.replicas, wish.reason) == (1, ScalingReason.QUIET)
    # A start that takes long is put off for longer.
    slow = scaled(*two, rules={**REQUESTS, "downscale_delay_s": 30}, start_s=50.0)
    assert looked(slow, 49).wish is None
    assert looked(slow, 50).wish is not None


def test_fewer_need_room_to_spare() -> None:
    rules = {**REQUESTS, "downscale_delay_s": 5}
    full = scaled(replica(0, running=5), replica(1, running=4), rules=rules)
    assert looked(full, 60).wish is None
    some = scaled(replica(0, running=4), replica(1, running=4), rules=rules)
    assert looked(some, 60).wish is not None


def test_none_is_ended_while_one_starts_or_another_leaves() -> None:
    rules = {**REQUESTS, "downscale_delay_s": 5}
    starting = scaled(replica(0), replica(1), rules=rules, target=3)
    assert looked(starting, 60).wish is None
    leaving = scaled(replica(0), replica(1), replica(2, leaving=True), rules=rules)
    assert leaving.kept == 2
    assert looked(leaving, 60).wish is None


def test_a_load_that_rises_while_one_is_drained_wants_it_back() -> None:
    busy = scaled(replica(0, running=10, waiting=5), replica(1, leaving=True), rules=REQUESTS)
    wish = looked(busy, 5).wish
    assert wish is not None
    assert wish.replicas == 2


def test_no_number_is_gone_back_to_at_the_rate_for_which_it_was_too_small() -> None:
    short = scaled(replica(0, running=10, waiting=9), rules=REQUESTS, arrived_per_s=5.0)
    watch = carried_out(looked(short, 3).watch, short, 3.0, more=True)
    rules = {**REQUESTS, "downscale_delay_s": 5}

    def quiet(rate: float | None, since: float = 4.0) -> ScalingWish | None:
        model = scaled(replica(0, running=2), replica(1), rules=rules, arrived_per_s=rate)
        seen = look(watch, model, since)
        for second in range(1, 11):
            seen = look(seen.watch, model, since + second)
        return seen.wish

    assert quiet(4.5) is None
    assert quiet(None) is None
    assert quiet(5 * ROOM) is not None
    # It may have become easier meanwhile.
    assert quiet(4.5, since=4000.0) is not None


def test_bounds_that_have_changed_hold_at_once() -> None:
    few = looked(scaled(replica(0), rules={"min": 2}), 0).wish
    assert few is not None
    assert (few.replicas, few.reason) == (2, ScalingReason.BOUNDS)
    many = looked(scaled(replica(0), replica(1), replica(2), rules={"max": 2}), 0).wish
    assert many is not None
    assert (many.replicas, many.reason) == (2, ScalingReason.BOUNDS)


def test_zero_is_for_others_to_decide() -> None:
    assert looked(scaled(replica(0), rules={"min": 0}), 1000).wish is None


def test_the_newest_replicas_leave_first() -> None:
    model = scaled(replica(0, ready_at_s=9.0), replica(1, ready_at_s=1.0), replica(2))
    assert [each.id for each in leaves(model, 1)] == ["r0", "r2"]
    assert leaves(model, 3) == ()


# Properties

RULES = st.builds(
    lambda least, more, delay, quiet: Scaling(
        min=least, max=least + more, target_ongoing_requests=3,
        upscale_delay_s=delay, downscale_delay_s=quiet,
    ),
    st.integers(1, 3), st.integers(0, 4), st.sampled_from([0, 2, 5]), st.sampled_from([10, 30]),
)  # fmt: skip
TRACES = st.lists(st.floats(0, 8), min_size=1, max_size=8)


def served(rules: Scaling, start_s: float, trace: list[float], seconds_each: int) -> MadeUpService:
    service = MadeUpService(rules, start_s=start_s, target=rules.least)
    service.ready_at_s = [0.0] * rules.least
    service.follow(trace, seconds_each)
    return service


@settings(max_examples=15, deadline=None)
@given(RULES, st.sampled_from([1.0, 5.0, 30.0]), TRACES, st.integers(5, 60))
def test_there_are_never_more_than_max_nor_fewer_than_min(
    rules: Scaling, start_s: float, trace: list[float], seconds_each: int
) -> None:
    service = served(rules, start_s, trace, seconds_each)
    assert all(rules.min <= target <= rules.max for target in service.targets)


@settings(max_examples=15, deadline=None)
@given(RULES, st.sampled_from([1.0, 5.0, 30.0]), TRACES, st.integers(5, 60))
def test_none_is_ended_while_more_are_wanted_nor_soon_after(
    rules: Scaling, start_s: float, trace: list[float], seconds_each: int
) -> None:
    service = served(rules, start_s, trace, seconds_each)
    quiet_s = max(rules.downscale_delay_s, start_s)
    for at_s, _, reason in service.changes:
        if reason is ScalingReason.QUIET:
            assert not [each for each in service.wanted_more if at_s - quiet_s < each <= at_s]


@settings(max_examples=15, deadline=None)
@given(RULES, st.sampled_from([1.0, 5.0, 30.0]), TRACES, st.integers(5, 60))
def test_changes_are_few(
    rules: Scaling, start_s: float, trace: list[float], seconds_each: int
) -> None:
    service = served(rules, start_s, trace, seconds_each)
    quiet_s = max(rules.downscale_delay_s, start_s)
    down = [at for at, _, reason in service.changes if reason is ScalingReason.QUIET]
    assert all(later - at >= quiet_s for at, later in pairwise(down))
    # From the fewest to the most, once for each way down.
    up = len(service.changes) - len(down)
    assert up <= (len(down) + 1) * (rules.max - rules.least)


def too_few(service: MadeUpService) -> list[int]:
    """The numbers of replicas that turned out to be too small, in that order."""
    numbers = [service.rules.least, *(to for _, to, _ in service.changes)]
    return [before for before, after in pairwise(numbers) if after > before]


@settings(max_examples=15, deadline=None)
@given(RULES, st.sampled_from([1.0, 5.0, 30.0]), st.floats(0, 8))
def test_on_a_constant_load_no_number_is_too_small_twice(
    rules: Scaling, start_s: float, rate: float
) -> None:
    service = served(rules, start_s, [rate], 1200)
    numbers = too_few(service)
    assert numbers == sorted(set(numbers)), service.changes
    # As many as carry it, if there may be so many.
    assert service.targets[-1] >= min(math.ceil(rate), rules.max) or service.queue < 10


@settings(max_examples=15, deadline=None)
@given(st.integers(5, 20), st.floats(0, 6), st.floats(2, 6))
def test_a_load_that_comes_and_goes_within_the_quiet_time_finds_none_too_small_twice(
    pause_s: int, low: float, high: float
) -> None:
    rules = Scaling(min=1, max=4, target_ongoing_requests=3, downscale_delay_s=30)
    service = MadeUpService(rules, start_s=1.0)
    for _ in range(50):
        service.run(10, lambda _: max(low, high))
        service.run(pause_s, lambda _: min(low, high))
    numbers = too_few(service)
    assert numbers == sorted(set(numbers)), service.changes
    assert service.target >= min(math.ceil(min(low, high)), rules.max) or service.queue < 10


def test_what_is_too_few_makes_fewer_too_few() -> None:
    rules = Scaling(min=1, max=4, target_ongoing_requests=3, downscale_delay_s=30)
    service = MadeUpService(rules, start_s=1.0)
    service.run(3000, lambda _: 3.97)
    # Its queue ends once there are four, and one or two look like enough.
    assert too_few(service) == [1, 2, 3]
    assert service.target == 4
