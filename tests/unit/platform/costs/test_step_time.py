"""Predicting an engine's steps, with what it learns from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.costs import step_time
from loomserve.platform.costs.correction import Correction
from loomserve.platform.costs.step_time import OnlineModel, Step, StepTimes

PARTS = st.lists(st.tuples(st.integers(0, 4096), st.integers(1, 2048)), min_size=1, max_size=40)


def seconds_of(step: Step) -> float:
    """An engine as one might be: weights to read, tokens to multiply, KV to attend to."""
    return (
        5e-3
        + 4e-4 * step.tokens
        + 2e-4 * step.requests
        + 3e-7 * step.context
        + 5e-8 * step.attention
    )


def prefill(tokens: int, chunk: int) -> Iterable[Step]:
    """Steps that compute ``tokens`` of one request alone from nothing, ``chunk`` at a time."""
    for computed in range(0, tokens, chunk):
        yield Step.of([(computed, min(chunk, tokens - computed))])


def some_step(rng: random.Random) -> Step:
    decodes = [(rng.randint(1, 2000), 1) for _ in range(rng.randint(1, 16))]
    prefills = [(rng.choice((0, 512)), rng.randint(1, 512))] if rng.random() < 0.2 else []
    return Step.of(decodes + prefills)


def served(
    times: StepTimes, steps: int, seconds: Callable[[Step], float], seed: int = 0
) -> StepTimes:
    rng = random.Random(seed)
    for _ in range(steps):
        step = some_step(rng)
        times.observe(step, seconds(step))
    return times


def off(times: StepTimes, slower: float = 1.0) -> float:
    rng = random.Random(99)
    steps = [some_step(rng) for _ in range(200)]
    return max(abs(times.seconds(s) / (slower * seconds_of(s)) - 1) for s in steps)


def noisy(spread: float, seed: int = 1) -> Callable[[Step], float]:
    rng = random.Random(seed)
    return lambda step: seconds_of(step) * rng.lognormvariate(0, spread)


@given(PARTS)
def test_a_step_sums_up_its_requests(parts: list[tuple[int, int]]) -> None:
    step = Step.of(parts)
    assert (step.requests, step.tokens) == (len(parts), sum(new for _, new in parts))
    assert step.context == sum(computed for computed, _ in parts)
    pairs = sum(computed + token + 0.5 for computed, new in parts for token in range(new))
    assert step.attention == pytest.approx(pairs)


@given(st.integers(1, 5000), st.integers(1, 3000))
def test_a_prefill_in_chunks_costs_the_sum_of_its_steps(tokens: int, chunk: int) -> None:
    model = OnlineModel()
    steps = list(prefill(tokens, chunk))
    assert sum(step.tokens for step in steps) == tokens
    assert model.prefill_s(tokens, chunk) == pytest.approx(sum(map(model.seconds, steps)))


def test_without_a_profile_an_engine_is_learnt_from_its_steps() -> None:
    times = served(StepTimes.unprofiled(), 1000, noisy(0.03))
    assert off(times) < 0.1
    assert times.error < 0.06
    whole = sum(map(seconds_of, prefill(2000, 512)))
    assert times.prefill_s(2000, 512) == pytest.approx(whole, rel=0.15)


def test_what_a_profile_measured_is_known_from_the_first_step() -> None:
    rng, seconds = random.Random(0), noisy(0.03)
    samples = [(step, seconds(step)) for step in (some_step(rng) for _ in range(400))]
    times = StepTimes(OnlineModel.of(samples))
    assert off(times) < 0.1
    whole = sum(map(seconds_of, prefill(2000, 512)))
    assert times.prefill_s(2000, 512) == pytest.approx(whole, rel=0.15)


def test_after_the_machine_gets_slower_predictions_follow() -> None:
    times = served(StepTimes.unprofiled(), 500, noisy(0.03))
    served(times, 60, lambda step: 2 * seconds_of(step))
    assert off(times, slower=2) < 0.1
    served(times, 60, seconds_of)
    assert off(times) < 0.1


def test_a_stalled_step_hardly_moves_predictions() -> None:
    times = served(StepTimes.unprofiled(), 500, seconds_of)
    served(times, 1, lambda step: 1000 * seconds_of(step))
    assert off(times) < 0.1


def test_a_step_as_predicted_is_learnt_in_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = OnlineModel(), Step.of([(100, 1)] * 8)
    for _ in range(100):
        model.learn([(step, 0.01)])
    sweeps: list[float] = []
    sweep = model._descend
    monkeypatch.setattr(model, "_descend", lambda: sweeps.append(sweep()) or sweeps[-1])
    model.learn([(step, 0.01)])
    assert len(sweeps) == 1
    # One that is not takes as many as it needs.
    model.learn([(Step.of([(100, 1)] * 16), 0.05)])
    assert len(sweeps) > 2


def test_steps_weigh_the_same_whether_they_are_learnt_together_or_each_alone() -> None:
    rng = random.Random(5)
    steps = [(step, seconds_of(step)) for step in (some_step(rng) for _ in range(40))]
    together, alone = OnlineModel(), OnlineModel()
    together.learn(steps)
    for one in steps:
        alone.learn([one])
    for sums, others in zip(together._products, alone._products, strict=True):
        assert sums == pytest.approx(others, rel=1e-9)
    assert together._targets == pytest.approx(alone._targets, rel=1e-9)


def test_a_step_is_learnt_from_later_but_before_anything_is_predicted() -> None:
    kept, asked = StepTimes.unprofiled(), StepTimes.unprofiled()
    rng = random.Random(6)
    learnt: list[int] = []
    learn = kept._model.learn
    kept._model.learn = lambda timed: learnt.append(len(timed)) or learn(timed)  # type: ignore
    for _ in range(320):
        step = some_step(rng)
        for times in (kept, asked):
            times.observe(step, seconds_of(step))
        assert asked.seconds(step) > 0
    assert learnt == [16] * 20
    kept.observe(step, 100.0)
    before, predicted = kept._correction.factor, kept.prefill_s(1000, 512)
    assert kept._correction.factor > before
    assert learnt[-1] == 1
    asked.observe(step, 100.0)
    assert predicted == pytest.approx(asked.prefill_s(1000, 512), rel=0.05)
    assert kept.predicted_s == pytest.approx(asked.predicted_s, rel=0.1)


def test_what_never_occurs_is_not_forgotten_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if many thousands of steps passed between these.
    monkeypatch.setattr(step_time, "_FORGETTING", 1e-60)
    model = OnlineModel()
    step = Step.of([(0, 256)])
    for _ in range(10):
        model.learn([(step, 0.25)])
    assert model.seconds(step) == pytest.approx(0.25, rel=1e-3)
    assert 0.25 < model.seconds(Step.of([(256, 256)])) < 1


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50), PARTS)
def test_predictions_are_positive_whatever_was_measured(
    measured: list[float], parts: list[tuple[int, int]]
) -> None:
    times = StepTimes.unprofiled()
    for seconds in measured:
        times.observe(Step.of(parts), seconds)
    assert times.seconds(Step.of([(0, 1)])) >= 0
    assert times.seconds(Step.of(parts)) > 0
    assert times.error >= 0


def test_noise_does_not_swing_the_correction() -> None:
    rng = random.Random(3)
    correction = Correction(trusted=True)
    factors = []
    for _ in range(1000):
        correction.observe(1.0, rng.lognormvariate(0, 0.1))
        factors.append(correction.factor)
    swing = (sum((factor - 1) ** 2 for factor in factors) / len(factors)) ** 0.5
    assert swing < 0.05


def test_an_outlier_counts_for_little() -> None:
    correction = Correction(trusted=True)
    correction.observe(1.0, 1000.0)
    assert correction.factor < 1.07


def test_the_error_is_that_of_the_latest_predictions() -> None:
    correction = Correction(trusted=True)
    assert correction.error == 0
    correction.score(1.1, 1.0)
    assert correction.error == pytest.approx(0.1)
    for _ in range(2000):
        correction.score(1.0, 1.0)
    assert correction.error < 1e-6
