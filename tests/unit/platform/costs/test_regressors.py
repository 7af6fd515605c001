"""The regressors of a step's time, their scores, and the choice among them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from loomserve.platform.costs.regressors import (
    DEGREES,
    REGRESSORS,
    FittedModel,
    RegressorScore,
    compare,
    held_out,
    mape,
    noise,
    winner,
)
from loomserve.platform.costs.step_time import Step, TimedStep


def seconds_of(step: Step) -> float:
    return 5e-3 + 4e-4 * step.tokens + 3e-7 * step.context + 5e-8 * step.attention


def prefill(tokens: int, chunk: int) -> Iterable[Step]:
    """Steps that compute ``tokens`` of one request alone from nothing, ``chunk`` at a time."""
    for computed in range(0, tokens, chunk):
        yield Step.of([(computed, min(chunk, tokens - computed))])


def samples(number: int, spread: float = 0.01) -> list[TimedStep]:
    rng = random.Random(0)
    steps = [
        Step.of(
            (rng.randint(0, 1000), rng.choice((1, 1, 1, rng.randint(1, 400))))
            for _ in range(rng.randint(1, 12))
        )
        for _ in range(number)
    ]
    return [(step, seconds_of(step) * rng.lognormvariate(0, spread)) for step in steps]


@pytest.mark.parametrize("name", REGRESSORS)
@pytest.mark.parametrize("degree", [1, 3])
def test_one_step_is_predicted_as_many_are(name: str, degree: int) -> None:
    model = FittedModel(name, degree, samples(120), longest=1024)
    steps = [step for step, _ in samples(200)]
    np.testing.assert_allclose(list(map(model.seconds, steps)), model.predict(steps))
    assert min(map(model.seconds, steps)) > 0


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_prefill_is_near_the_sum_of_its_steps(name: str) -> None:
    model = FittedModel(name, 1, samples(400), longest=4096)
    for tokens, chunk in ((1, 256), (256, 256), (1000, 256), (4096, 256), (100, 2048)):
        whole = sum(map(model.seconds, prefill(tokens, chunk)))
        assert model.prefill_s(tokens, chunk) == pytest.approx(whole, rel=0.05)
    assert model.prefill_s(0, 256) == 0


def test_a_prefill_longer_than_the_context_goes_on_at_the_last_pace() -> None:
    model = FittedModel("linear", 1, samples(200), longest=1024)
    assert model.prefill_s(4096, 256) > 3 * model.prefill_s(1024, 256)


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
    best = RegressorScore("linear", 3, 0.100, 0.01, 1e-5)
    slow = RegressorScore("linear", 1, 0.105, 0.01, 1e-3)
    quick = RegressorScore("ridge", 1, 0.109, 0.01, 1e-5)
    worse = RegressorScore("ridge", 1, 0.2, 0.01, 1e-6)
    assert winner([best, slow, quick, worse]) == quick
    assert winner([best, worse]) == best
