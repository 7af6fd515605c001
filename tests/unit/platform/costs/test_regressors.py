"""The regressors of a step's time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loomserve.platform.costs.regressors import REGRESSORS, FittedModel
from loomserve.platform.costs.step_time import Step, TimedStep, prefill


def seconds_of(step: Step) -> float:
    return 5e-3 + 4e-4 * step.tokens + 3e-7 * step.context + 5e-8 * step.attention


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
    # Trees compare in single precision, where a value may lie on either side of a split.
    np.testing.assert_allclose(
        np.median(np.array([model.seconds(s) for s in steps]) / model.predict(steps)), 1, rtol=1e-6
    )
    assert min(map(model.seconds, steps)) > 0


@pytest.mark.parametrize("name", ["linear", "random forest"])
def test_a_prefill_is_near_the_sum_of_its_steps(name: str) -> None:
    model = FittedModel(name, 1, samples(400), longest=4096)
    for tokens, chunk in ((1, 256), (256, 256), (1000, 256), (4096, 256), (100, 2048)):
        whole = sum(map(model.seconds, prefill(tokens, chunk)))
        assert model.prefill_s(tokens, chunk) == pytest.approx(whole, rel=0.05)
    assert model.prefill_s(0, 256) == 0


def test_a_prefill_longer_than_the_context_goes_on_at_the_last_pace() -> None:
    model = FittedModel("linear", 1, samples(200), longest=1024)
    assert model.prefill_s(4096, 256) > 3 * model.prefill_s(1024, 256)
