"""The pure parts of ``benchmarks/slo.py``."""

from __future__ import annotations

import statistics
from dataclasses import asdict

import pytest

from benchmarks.report import Spread
from benchmarks.slo import ARMS, Served, likely_jobs, named, ratios, timed
from loomserve.platform.scheduling.policy.expected import Expected


def served(met: int, of: int = 10, seconds: float = 5.0) -> Served:
    return Served(seconds, [1.0] * met + [3.0] * (of - met), [2.0] * of, 1.0, 0.0)


def test_goodput_counts_what_met_its_deadline() -> None:
    one = served(4)
    assert (one.met, one.goodput, one.attainment) == (4, 0.8, 0.4)


def test_ratios_are_taken_run_by_run() -> None:
    runs = [
        {arm: served(8 if arm == ("sjf", "perfect") else 4) for arm in ARMS},
        {arm: served(2 if arm == ("fcfs", "none") else 4) for arm in ARMS},
    ]
    found = ratios(runs)
    assert found["goodput_vs_fcfs"]["fair"] == asdict(Spread.of([1.0, 2.0]))
    assert found["share_of_oracle"]["sjf"] == asdict(Spread.of([0.5, 1.0]))
    assert set(found["goodput_vs_fcfs"]) == {named(arm) for arm in ARMS} - {"fcfs"}


def test_a_load_at_which_nothing_is_in_time_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="--load"):
        ratios([{arm: served(0) for arm in ARMS}])


def test_drawn_predictions_are_as_good_as_they_say() -> None:
    jobs = likely_jobs(4000, "test")
    beyond = statistics.fmean(job.answer > job.predicted.high for job in jobs)
    assert 0.02 < beyond < 0.07
    free = [job for job in jobs if job.answer < 384 and job.predicted.tokens < 384]
    assert (
        0.4
        < statistics.correlation(
            [job.answer for job in free], [job.predicted.tokens for job in free]
        )
        < 0.7
    )
    assert jobs[0].known("none") is None
    assert jobs[0].known("perfect") == Expected(jobs[0].answer, jobs[0].answer)
    assert jobs[0].known("predicted") == jobs[0].predicted


def test_arrivals_keep_their_rate_and_deadlines_their_range() -> None:
    coming = timed(likely_jobs(500, "test"), None, rate=2.0, longest_s=35.0, seed="test")
    assert coming[-1].at_s == pytest.approx(499 / 2.0)
    assert all(0.1 <= one.deadline_s <= 35.0 for one in coming)
    assert 15 < statistics.fmean(one.deadline_s for one in coming) < 20
