"""Buckets, calibration, and what a prediction promises."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.lengths.predict.head import BUCKETS, EDGES, Guess, bucket_of
from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.predictor import calibrated, margin

lengths = st.floats(0, 1e5)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (7, 0), (8, 1), (31, 2), (1023, 7), (2047, 8), (9999, 8)]
)
def test_a_bucket_is_a_doubling_of_length(tokens: int, bucket: int) -> None:
    assert bucket_of(tokens) == bucket
    assert len(EDGES) == BUCKETS + 1 == 10


@settings(deadline=None)
@given(
    low=lengths,
    tokens=lengths,
    high=lengths,
    median=lengths,
    widen=st.floats(-5, 5),
    most=st.integers(1, 4096),
)
def test_an_interval_holds_its_prediction_and_keeps_within_max_tokens(
    low: float, tokens: float, high: float, median: float, widen: float, most: int
) -> None:
    guess = Guess(tokens, low, high, median, 0)
    for bound in (most, math.inf):
        got = calibrated(guess, widen, bound)
        assert 0 <= got.low <= got.tokens <= got.high
        assert got.high <= bound
        assert got.median == min(median, bound)


def test_without_calibration_the_interval_is_all_that_may_be() -> None:
    got = calibrated(Guess(10, 5, 20, 8, 1), math.inf, 64)
    assert (got.low, got.tokens, got.high, got.median) == (0, 10, 64, 8)
    assert calibrated(Guess(10, 5, 20, 8, 1), math.inf, math.inf).high == math.inf


def test_too_few_samples_calibrate_nothing() -> None:
    guesses = [Guess(10, 5, 20, 8, 1)] * 9
    assert margin(guesses[:8], [10] * 8, 0.9) == math.inf
    assert margin(guesses, [10] * 9, 0.9) < 0


@pytest.mark.parametrize("quantiles", [(0.9, 1.1), (0.2, 5.0), (1.5, 1.6)])
def test_intervals_hold_nine_lengths_in_ten_however_wrong_they_were(
    quantiles: tuple[float, float],
) -> None:
    rng = random.Random(0)

    def draw(number: int) -> tuple[list[Guess], list[int]]:
        centres = [rng.uniform(20, 500) for _ in range(number)]
        low, high = quantiles
        guesses = [Guess(math.sqrt(low * high) * c, low * c, high * c, c, 0) for c in centres]
        return guesses, [round(c * rng.lognormvariate(0, 0.4)) for c in centres]

    held = []
    for _ in range(40):
        widen = margin(*draw(200), 0.9)
        for guess, tokens in zip(*draw(200), strict=True):
            bounds = calibrated(guess, widen, math.inf)
            held.append(bounds.low <= tokens <= bounds.high)
    assert np.mean(held) == pytest.approx(0.9, abs=0.02)


def test_a_query_need_not_know_its_bound() -> None:
    assert LengthQuery("", "hello", 1).max_tokens is None
