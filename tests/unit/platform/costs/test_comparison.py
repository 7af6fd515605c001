"""Scores of regressors, and the choice among them."""

from __future__ import annotations

import numpy as np
import pytest

from loomserve.platform.costs.comparison import (
    DEGREES,
    RegressorScore,
    compare,
    held_out,
    mape,
    noise,
    winner,
)
from loomserve.platform.costs.regressors import REGRESSORS
from loomserve.platform.costs.step_time import Step
from tests.unit.platform.costs.test_regressors import samples


def test_a_step_is_held_out_with_all_its_samples() -> None:
    many = samples(50) * 3
    known, unknown = held_out(many, 0.2, seed=0)
    assert len(unknown) == 30
    assert not {step for step, _ in known} & {step for step, _ in unknown}
    assert sorted(map(repr, known + unknown)) == sorted(map(repr, many))


def test_noise_is_that_of_steps_that_repeat() -> None:
    step, other = Step.of([(0, 1)]), Step.of([(0, 2)])
    assert noise([(step, 1.0), (step, 2.0), (step, 4.0), (other, 9.0)]) == pytest.approx(0.5)
    assert noise([(step, 1.0), (other, 9.0)]) is None


def test_every_regressor_is_compared_at_every_degree() -> None:
    few = samples(60)
    scores = compare(few)
    assert {(s.regressor, s.degree) for s in scores} == {
        (n, d) for n in REGRESSORS for d in DEGREES
    }
    known, unknown = held_out(few, 0.2, seed=1)
    mean = np.full(len(unknown), np.mean([seconds for _, seconds in known]))
    assert min(score.mape for score in scores) < mape(mean, unknown) / 5


def test_the_winner_is_the_simplest_that_may_be_the_best() -> None:
    best = RegressorScore("linear", 3, 0.100, 0.01, 1, 1e-5)
    slow = RegressorScore("random forest", 1, 0.105, 0.01, 1, 1e-3)
    quick = RegressorScore("ridge", 1, 0.109, 0.01, 1, 1e-5)
    worse = RegressorScore("lasso", 1, 0.2, 0.01, 1, 1e-6)
    assert winner([best, slow, quick, worse]) == quick
    assert winner([best, worse]) == best
