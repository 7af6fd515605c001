"""What borrowers add to a lender's time per output token."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lending.policy.limits import ServedTime

seconds = st.floats(0.001, 1.0)


def after(steps: Iterable[tuple[float, float]]) -> ServedTime:
    times = ServedTime()
    for step_s, served_s in steps:
        times.add(step_s, served_s)
    return times


def test_a_few_steps_tell_nothing() -> None:
    assert after([(0.02, 0.0)] * 63).p99() is None
    assert after([(0.02, 0.0)] * 64).p99() == pytest.approx((0.02, 0.02))


def test_what_is_served_in_every_step_counts_in_full() -> None:
    assert after([(0.025, 0.005)] * 128).p99() == pytest.approx((0.025, 0.02))


def test_one_slow_step_makes_no_answer_slow() -> None:
    steps = [(0.02, 0.0)] * 60 + [(0.084, 0.064)] + [(0.02, 0.0)] * 60
    assert after(steps).p99() == pytest.approx((0.022, 0.02))


def test_the_lenders_own_prefill_is_not_its_borrowers_doing() -> None:
    steps = [(0.02, 0.0)] * 60 + [(0.3, 0.0)] * 8 + [(0.02, 0.0)] * 60
    times = after(steps).p99()
    assert times is not None
    assert times.disturbed_s == times.undisturbed_s == pytest.approx(0.09)


def test_old_steps_are_forgotten() -> None:
    assert after([(0.9, 0.5)] * 64 + [(0.02, 0.0)] * 128).p99() == pytest.approx((0.02, 0.02))


@given(st.lists(st.tuples(seconds, seconds), min_size=64, max_size=200))
def test_borrowers_make_no_answer_quicker(steps: list[tuple[float, float]]) -> None:
    times = after(steps).p99()
    assert times is not None
    assert 0 <= times.undisturbed_s <= times.disturbed_s <= 1.0 + 1e-9
