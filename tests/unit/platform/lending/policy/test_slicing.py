"""Operator slicing: the queueing model against simulation, the algorithm by its properties."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lending.policy.slicing import (
    Operator,
    expected_wait,
    split,
)

seconds = st.floats(1e-6, 1e-2)
times = st.lists(seconds, max_size=12)
plain = st.builds(
    Operator,
    name=st.uuids().map(str),
    seconds=seconds,
    most_slices=st.integers(1, 32),
    slice_overhead_s=st.just(0.0) | st.floats(0, 1e-3),
)
steps = st.lists(plain, max_size=12, unique_by=lambda operator: operator.name)

# A step of small, middling and large operators, and a sender whose slack lies below all of them,
# among them, above all of them, and is negative.
STEP_S = (0.4e-3, 0.1e-3, 0.9e-3, 0.2e-3, 2.5e-3)
SENDERS = [
    (0.3e-3, 0.25e-3),
    (0.6e-3, 0.1e-3),
    (3.0e-3, 0.2e-3),
    (0.1e-3, 0.4e-3),
    (0.2e-3, 0.2e-3),
]


def residuals(operator_s: tuple[float, ...], arrivals: int) -> np.ndarray:
    """What is left of the operator that each task meets, at random times of a step."""
    ends = np.cumsum(operator_s)
    at = np.random.default_rng(7).uniform(0, ends[-1], arrivals)
    return ends[np.searchsorted(ends, at, side="right")] - at


@pytest.mark.parametrize(("local_s", "service_s"), SENDERS)
def test_the_expected_wait_is_that_of_simulated_tasks(local_s: float, service_s: float) -> None:
    left_s = residuals(STEP_S, 200_000)
    delays_s = np.maximum(left_s + service_s - local_s, 0.0)
    error_s = float(delays_s.std() / np.sqrt(len(delays_s)))
    predicted_s = expected_wait(STEP_S, local_s, service_s)
    assert predicted_s == pytest.approx(float(delays_s.mean()), abs=5 * error_s + 1e-12)


@given(times, seconds, seconds, seconds)
def test_a_sender_that_does_more_itself_waits_less_and_one_that_sends_more_waits_longer(
    operator_s: list[float], local_s: float, service_s: float, more_s: float
) -> None:
    wait_s = expected_wait(operator_s, local_s, service_s)
    assert expected_wait(operator_s, local_s + more_s, service_s) <= wait_s + 1e-12
    assert expected_wait(operator_s, local_s, service_s + more_s) >= wait_s - 1e-12


@given(times.filter(bool), seconds, seconds)
def test_halving_any_operator_never_makes_a_task_wait_longer(
    operator_s: list[float], local_s: float, service_s: float
) -> None:
    wait_s = expected_wait(operator_s, local_s, service_s)
    for at, whole_s in enumerate(operator_s):
        halved_s = [*operator_s[:at], whole_s / 2, whole_s / 2, *operator_s[at + 1 :]]
        assert expected_wait(halved_s, local_s, service_s) <= wait_s + 1e-12


@given(times, seconds, seconds)
def test_a_task_waits_at_least_for_its_service_and_no_longer_than_for_the_longest_operator(
    operator_s: list[float], local_s: float, service_s: float
) -> None:
    floor_s = max(service_s - local_s, 0.0)
    wait_s = expected_wait(operator_s, local_s, service_s)
    assert floor_s <= wait_s <= floor_s + max(operator_s, default=0.0) / 2 + 1e-12


def test_a_lender_without_operators_delays_nobody() -> None:
    plan = split([], local_s=1e-3, service_s=0.5e-3, threshold_s=0.0)
    assert (plan.slices, plan.wait_before_s, plan.wait_after_s, plan.overhead_s) == ({}, 0, 0, 0)


def test_operators_within_the_slack_delay_nobody_and_stay_whole() -> None:
    operators = [Operator("a", 1e-3, 8), Operator("b", 2e-3, 8)]
    plan = split(operators, local_s=3e-3, service_s=1e-3, threshold_s=0.0)
    assert plan.slices == {"a": 1, "b": 1}
    assert plan.wait_before_s == plan.wait_after_s == 0


def test_the_longest_is_halved_until_the_wait_is_below_the_threshold() -> None:
    # In seconds: 8 with 1 + 1 waits (64 + 1 + 1) / 20 = 3.3; 4 + 4: 1.7; 2 + 2 + 2 + 2: 0.9.
    operators = [Operator("head", 8.0, 16), Operator("up", 1.0, 16), Operator("down", 1.0, 16)]
    plan = split(operators, local_s=0.0, service_s=0.0, threshold_s=1.0)
    assert plan.slices == {"head": 4, "up": 1, "down": 1}
    assert plan.wait_before_s == pytest.approx(3.3)
    assert plan.wait_after_s == pytest.approx(0.9)


def test_no_operator_is_cut_below_the_slack_however_low_the_threshold() -> None:
    plan = split([Operator("head", 8.0, 64)], local_s=1.5, service_s=0.5, threshold_s=0.0)
    assert plan.slices == {"head": 8}
    assert plan.wait_after_s == 0


def test_an_operator_that_cannot_be_cut_leaves_the_others_to_be_cut() -> None:
    operators = [Operator("sampling", 8.0), Operator("head", 4.0, 2)]
    plan = split(operators, local_s=0.0, service_s=0.0, threshold_s=0.0)
    assert plan.slices == {"sampling": 1, "head": 2}


def test_the_service_of_the_guests_themselves_cuts_no_operator() -> None:
    # The sender waits a second whatever the lender does, and 0.05 s for the operator.
    plan = split([Operator("head", 0.1, 64)], local_s=0.0, service_s=1.0, threshold_s=0.06)
    assert plan.slices == {"head": 1}
    assert plan.wait_before_s == pytest.approx(1.05)


def test_an_operator_whose_slices_cost_as_much_as_the_whole_stays_whole() -> None:
    plan = split([Operator("head", 1.0, 64, slice_overhead_s=0.6)], 0.0, 0.0, threshold_s=0.0)
    assert plan.slices == {"head": 1}


def test_overhead_is_that_of_all_slices() -> None:
    operators = [Operator("head", 8.0, 4, slice_overhead_s=0.5), Operator("norm", 0.25)]
    plan = split(operators, local_s=0.0, service_s=0.0, threshold_s=0.0)
    assert plan.slices == {"head": 4, "norm": 1}
    assert plan.overhead_s == pytest.approx(4 * 0.5)


@given(operators=steps, most_s=st.floats(0, 1e-2))
def test_cutting_costs_no_more_than_it_may(operators: list[Operator], most_s: float) -> None:
    assert split(operators, 0.0, 1e-4, 0.0, most_s).overhead_s <= most_s


def test_an_operator_that_is_cheap_to_cut_is_cut_where_others_cost_too_much() -> None:
    operators = [Operator("dear", 2e-3, 2, 1e-3), Operator("cheap", 1e-3, 4, 1e-5)]
    plan = split(operators, 0.0, 0.0, 0.0, 1e-4)
    assert plan.slices == {"dear": 1, "cheap": 4}


def test_two_operators_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        split([Operator("a", 1.0), Operator("a", 2.0)], 0.0, 0.0, threshold_s=0.0)


@given(steps, seconds, seconds, seconds)
def test_a_plan_keeps_to_the_most_slices_and_never_makes_tasks_wait_longer(
    operators: list[Operator], local_s: float, service_s: float, threshold_s: float
) -> None:
    plan = split(operators, local_s, service_s, threshold_s)
    assert all(1 <= plan.slices[each.name] <= each.most_slices for each in operators)
    assert plan.wait_after_s <= plan.wait_before_s
    assert plan.overhead_s >= -1e-12


@given(steps, seconds, seconds, seconds)
def test_a_plan_above_the_threshold_has_nothing_left_to_halve(
    operators: list[Operator], local_s: float, service_s: float, threshold_s: float
) -> None:
    free = [Operator(each.name, each.seconds, each.most_slices) for each in operators]
    plan = split(free, local_s, service_s, threshold_s)
    slack_s = max(local_s - service_s, 0.0)
    blocked_s = plan.wait_after_s - max(service_s - local_s, 0.0)
    if blocked_s > threshold_s:
        for each in free:
            slices = plan.slices[each.name]
            # Up to where the wait is too little for a halving to show in floating point.
            short = each.slice_s(slices) <= slack_s * (1 + 1e-6) + 1e-9
            assert short or 2 * slices > each.most_slices


@given(steps, seconds, seconds, st.lists(seconds, min_size=2, max_size=4))
def test_a_lower_threshold_never_means_fewer_slices(
    operators: list[Operator], local_s: float, service_s: float, thresholds: list[float]
) -> None:
    plans = [split(operators, local_s, service_s, each) for each in sorted(thresholds)]
    for fine, coarse in pairwise(plans):
        assert all(fine.slices[each.name] >= coarse.slices[each.name] for each in operators)
