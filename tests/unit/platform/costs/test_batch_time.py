"""Nearest neighbours of measured batches, and what they learn from batches to come."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.costs.batch_time import BatchShape, BatchTimes, TimedBatch


def linear(shape: BatchShape) -> float:
    return 1.0 + 0.01 * shape.size * shape.length + 0.1 * shape.generation


def measured(shape: BatchShape) -> TimedBatch:
    return shape, linear(shape)


GRID = [
    measured(BatchShape(size, length, generation))
    for size in (1, 8, 32)
    for length in (10, 40, 160)
    for generation in (10, 40, 160)
]
UNKNOWN = BatchShape(16, 80, 300)
KNOWING_GRID = BatchTimes(GRID, 0.0)

shapes = st.builds(BatchShape, st.integers(1, 40), st.integers(1, 300), st.integers(1, 300))


def predicted(times: BatchTimes, shape: BatchShape) -> float:
    return float(times.seconds([shape])[0])


@pytest.mark.parametrize("batch", GRID[::5])
def test_what_was_measured_is_predicted(batch: TimedBatch) -> None:
    assert predicted(KNOWING_GRID, batch[0]) == pytest.approx(batch[1])


@settings(deadline=None)
@given(st.lists(shapes, min_size=1))
def test_no_prediction_leaves_the_range_of_what_was_measured(several: list[BatchShape]) -> None:
    seconds = [seconds for _, seconds in GRID]
    found = KNOWING_GRID.seconds(several)
    assert min(seconds) - 1e-9 <= found.min() <= found.max() <= max(seconds) + 1e-9


def test_many_batches_are_predicted_as_each_alone() -> None:
    times = BatchTimes(GRID, 0.0)
    several = [BatchShape(3, 20, 30), UNKNOWN, BatchShape(40, 5, 5)]
    assert times.seconds(several).tolist() == [predicted(times, one) for one in several]
    assert times.seconds([]).size == 0


def test_nothing_is_learnt_before_two_minutes_and_all_that_was_wrong_after_them() -> None:
    times = BatchTimes(GRID, now=50.0)
    before = predicted(times, UNKNOWN)
    times.finished(UNKNOWN, 90.0, now=60.0)
    times.finished(*GRID[0], now=169.9)
    assert predicted(times, UNKNOWN) == before
    times.finished(*GRID[1], now=170.0)
    assert predicted(times, UNKNOWN) == 90.0
    assert times.samples == len(GRID) + 1


@pytest.mark.parametrize(
    ("seconds", "actual", "learnt"),
    [
        (10.0, 12.0, False),  # off by 2 s, no more
        (10.0, 12.1, False),  # by more than 2 s, by less than 20 %
        (10.0, 13.0, True),
        (10.0, 8.1, False),  # by more than 20 %, by less than 2 s
        (10.0, 7.9, True),
        (100.0, 120.0, False),
        (100.0, 126.0, True),
    ],
)
def test_who_was_off_by_two_seconds_and_a_fifth_is_learnt(
    seconds: float, actual: float, learnt: bool
) -> None:
    shape = BatchShape(4, 20, 20)
    times = BatchTimes([(shape, seconds)], 0.0)
    times.finished(shape, actual, now=120.0)
    assert times.samples == 1 + learnt


def test_each_batch_is_looked_at_once() -> None:
    times = BatchTimes(GRID, 0.0)
    times.finished(UNKNOWN, 500.0, now=120.0)
    times.finished(*GRID[0], now=240.0)
    times.finished(*GRID[0], now=360.0)
    assert times.samples == len(GRID) + 1


def test_the_error_falls_as_batches_finish() -> None:
    source = random.Random(0)
    times = BatchTimes(GRID[:1], 0.0)
    errors = []
    for at in range(120):
        shape = BatchShape(source.randint(1, 40), source.randint(1, 300), source.randint(1, 300))
        errors.append(abs(predicted(times, shape) / linear(shape) - 1))
        times.finished(shape, linear(shape), now=60.0 * at)
    assert statistics.fmean(errors[-30:]) < 0.25 < statistics.fmean(errors[:5])
    assert times.samples < 120


def test_it_must_know_something() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BatchTimes([], 0.0)
