"""What is compared of runs in which a cold model computed for a hot one."""

from __future__ import annotations

import pytest

from benchmarks.weave import Run, Served, compared

TASKS = {"post_us": 2.0, "pickup_us": 3.0, "wait_us": 9.0}


def run(hot_tpot_ms: float, cold_tpot_ms: float, **figures: float) -> Run:
    hot, cold = (Served(100, 2.0, [tpot, tpot], [50.0]) for tpot in (hot_tpot_ms, cold_tpot_ms))
    return Run(hot, cold, figures)


def test_what_a_task_costs_is_of_the_loans_that_lasted() -> None:
    woven = [run(10, 30, **TASKS), run(10, 30)]
    found = compared({"dedicated": {1.0: [run(20, 20)] * 2}, "slices": {1.0: woven}})
    assert found["hot_tpot_vs_dedicated_at_peak"]["median"] == pytest.approx(0.5)
    assert found["cold_tpot_ratio_mean"]["median"] == pytest.approx(1.5)
    assert found["per_layer_overhead_us"]["median"] == pytest.approx(5)
    assert found["wait_us_splitting"]["median"] == pytest.approx(3)


def test_the_ratios_are_told_even_where_no_loan_lasted() -> None:
    found = compared({"dedicated": {1.0: [run(20, 20)]}, "slices": {1.0: [run(10, 30)]}})
    assert found["cold_tpot_ratio_mean"]["median"] == pytest.approx(1.5)
    assert not {"per_layer_overhead_us", "wait_us_splitting"} & found.keys()
