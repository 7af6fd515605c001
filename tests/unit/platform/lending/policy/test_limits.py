"""How much a lender may be used: tables of transitions, and properties over any observations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lending.policy.limits import (
    LoanLimit,
    LoanPhase,
    Observation,
    Rules,
    after,
    first,
    pressure,
)

RULES = Rules(most_tokens=64_000, step_tokens=4_000)
PERIOD_S = 0.05

HEALTHY = Observation(
    tasks=60,
    step_s=40e-3,
    late_s=1e-3,
    worst_wait_s=2e-3,
    used_tokens=64_000,
    tpot_s=0.0202,
    undisturbed_tpot_s=0.020,
)
STALLED = replace(HEALTHY, worst_wait_s=0.06)
OVER_BUDGET = replace(HEALTHY, tpot_s=0.024)
SLOW = replace(HEALTHY, late_s=16e-3)
NEAR = replace(HEALTHY, tpot_s=0.0227)
NOTHING = Observation(
    tasks=0,
    step_s=0.0,
    late_s=0.0,
    worst_wait_s=0.0,
    used_tokens=0,
)
OPEN = LoanLimit(RULES, LoanPhase.OPEN, 32_000, since_s=0.0, changed_s=0.0)
STOPPED = LoanLimit(RULES, LoanPhase.STOPPED, 0, since_s=99.8, changed_s=0.0, backoff_s=1.0)
EJECT = replace(STOPPED, phase=LoanPhase.EJECT)
PROBING = LoanLimit(RULES, LoanPhase.PROBING, 4_000, since_s=90.0, changed_s=90.0, backoff_s=1.0)

observations = st.builds(
    Observation,
    tasks=st.integers(0, 100),
    step_s=st.floats(0, 0.1),
    late_s=st.floats(0, 0.1),
    worst_wait_s=st.sampled_from([0.0, 0.01, 0.05, 1.0]),
    used_tokens=st.integers(0, 100_000),
    tpot_s=st.none() | st.floats(0.0, 0.05),
    undisturbed_tpot_s=st.none() | st.just(0.02),
)
histories = st.lists(st.tuples(st.floats(0.01, 2.0), observations), max_size=40)


def states(history: Iterable[tuple[float, Observation]], rules: Rules = RULES) -> list[LoanLimit]:
    now_s = 0.0
    reached = [first(rules, now_s)]
    for passed_s, seen in history:
        now_s += passed_s
        reached.append(after(reached[-1], seen, now_s))
    return reached


def stops(reached: list[LoanLimit]) -> int:
    away = (LoanPhase.STOPPED, LoanPhase.EJECT)
    return sum(was.phase not in away and now.phase in away for was, now in pairwise(reached))


@pytest.mark.parametrize(
    ("state", "seen", "phase", "tokens"),
    [
        (OPEN, STALLED, LoanPhase.STOPPED, 0),
        (OPEN, NOTHING, LoanPhase.OPEN, 32_000),
        (replace(OPEN, calm_periods=2), NEAR, LoanPhase.OPEN, 32_000),
        (OPEN, HEALTHY, LoanPhase.OPEN, 32_000),
        (replace(OPEN, calm_periods=2), HEALTHY, LoanPhase.OPEN, 36_000),
        (replace(OPEN, calm_periods=2, tokens=62_000), HEALTHY, LoanPhase.OPEN, 64_000),
        # What nobody uses says nothing of what could be borne.
        (
            replace(OPEN, calm_periods=2),
            replace(HEALTHY, used_tokens=9_000),
            LoanPhase.OPEN,
            32_000,
        ),
        (replace(OPEN, calm_periods=2), replace(HEALTHY, tasks=0), LoanPhase.OPEN, 32_000),
        (OPEN, OVER_BUDGET, LoanPhase.OPEN, 16_000),
        (OPEN, replace(OVER_BUDGET, used_tokens=20_000), LoanPhase.OPEN, 10_000),
        (OPEN, replace(OVER_BUDGET, used_tokens=0), LoanPhase.OPEN, 4_000),
        (OPEN, SLOW, LoanPhase.OPEN, 16_000),
        # The last decrease shall show its effect first.
        (replace(OPEN, changed_s=99.5), SLOW, LoanPhase.OPEN, 32_000),
        # It cannot even bear the fewest borrowers.
        (replace(OPEN, tokens=4_000), OVER_BUDGET, LoanPhase.STOPPED, 0),
        (PROBING, OVER_BUDGET, LoanPhase.STOPPED, 0),
        (PROBING, STALLED, LoanPhase.STOPPED, 0),
        (PROBING, NOTHING, LoanPhase.PROBING, 4_000),
        (replace(PROBING, calm_periods=2), HEALTHY, LoanPhase.OPEN, 4_000),
        (STOPPED, STALLED, LoanPhase.STOPPED, 0),
        (STOPPED, HEALTHY, LoanPhase.STOPPED, 0),
        (replace(STOPPED, since_s=99.4), STALLED, LoanPhase.EJECT, 0),
        (replace(STOPPED, since_s=99.0), HEALTHY, LoanPhase.PROBING, 4_000),
        (EJECT, NOTHING, LoanPhase.EJECT, 0),
        (replace(EJECT, since_s=99.0), STALLED, LoanPhase.EJECT, 0),
        (replace(EJECT, since_s=99.0), NOTHING, LoanPhase.PROBING, 4_000),
    ],
)
def test_transitions_at_the_hundredth_second(
    state: LoanLimit, seen: Observation, phase: LoanPhase, tokens: int
) -> None:
    state = after(state, seen, 100.0)
    assert (state.phase, state.tokens) == (phase, tokens)


@pytest.mark.parametrize(
    ("seen", "strain"),
    [
        (replace(HEALTHY, late_s=0.0, tpot_s=0.023), 1.0),
        (replace(HEALTHY, late_s=0.0, tpot_s=0.019), 0.0),
        (replace(HEALTHY, step_s=0.06, late_s=0.02), 1.0),
        (replace(HEALTHY, step_s=0.05, late_s=0.01), 0.5),
        (replace(HEALTHY, step_s=0.05, late_s=0.01, tpot_s=0.023), 1.0),
        (replace(HEALTHY, step_s=0.05, late_s=0.01, tpot_s=None), 0.5),
        (replace(HEALTHY, step_s=0.05, late_s=0.01, undisturbed_tpot_s=None), 0.5),
        (replace(HEALTHY, late_s=0.04), math.inf),
        (replace(NOTHING, tpot_s=0.023, undisturbed_tpot_s=0.020), 1.0),
        (NOTHING, None),
    ],
)
def test_pressure_is_the_greater_of_the_lenders_and_the_borrowers(
    seen: Observation, strain: float | None
) -> None:
    assert pressure(RULES, seen) == (None if strain is None else pytest.approx(strain))


@pytest.mark.parametrize(("held_s", "backoff_s"), [(0.0, 1.0), (1.0, 2.0), (40.0, 60.0)])
def test_each_stop_waits_twice_as_long_as_the_one_before_up_to_the_most(
    held_s: float, backoff_s: float
) -> None:
    stopped = after(replace(PROBING, backoff_s=held_s), STALLED, 100.0)
    assert stopped.backoff_s == backoff_s
    assert after(stopped, HEALTHY, 100.0 + backoff_s - 0.01).phase is LoanPhase.STOPPED
    assert after(stopped, HEALTHY, 100.0 + backoff_s).phase is LoanPhase.PROBING


@pytest.mark.parametrize(("opened_s", "held_s"), [(59.9, 0.0), (60.1, 4.0)])
def test_a_lender_that_was_open_for_long_has_no_stop_held_against_it(
    opened_s: float, held_s: float
) -> None:
    assert after(replace(OPEN, since_s=opened_s, backoff_s=4.0), NEAR, 100.0).backoff_s == held_s


@given(histories, st.integers(1, 100_000), st.integers(1, 100_000))
def test_the_limit_is_within_the_memory_and_nothing_is_placed_on_a_stopped_lender(
    history: list[tuple[float, Observation]], most: int, step: int
) -> None:
    for state in states(history, Rules(most_tokens=most, step_tokens=step)):
        if state.phase in (LoanPhase.STOPPED, LoanPhase.EJECT):
            assert state.tokens == 0
        else:
            assert 0 < state.tokens <= most


@given(histories)
def test_a_stalled_lender_is_stopped_at_the_first_observation(
    history: list[tuple[float, Observation]],
) -> None:
    assert states([*history, (PERIOD_S, STALLED)])[-1].tokens == 0


@given(histories)
def test_a_lender_that_never_answers_has_no_guests_soon(
    history: list[tuple[float, Observation]],
) -> None:
    periods = math.ceil(RULES.eject_s / PERIOD_S) + 2
    assert states([*history, *[(PERIOD_S, STALLED)] * periods])[-1].phase is LoanPhase.EJECT


@given(histories)
def test_a_healthy_lender_comes_back_to_all_of_its_memory(
    history: list[tuple[float, Observation]],
) -> None:
    backoff = math.ceil(RULES.most_backoff_s / 1.0) + 1
    growth = 3 * (1 + RULES.most_tokens // RULES.step_tokens)
    healthy = [(1.0, HEALTHY)] * (backoff + 3 + growth)
    last = states([*history, *healthy])[-1]
    assert (last.phase, last.tokens) == (LoanPhase.OPEN, RULES.most_tokens)


@given(st.lists(st.sampled_from([HEALTHY, STALLED, NOTHING]), max_size=190))
def test_no_pattern_of_stalls_stops_a_lender_more_often_than_backoffs_double(
    seen: list[Observation],
) -> None:
    # Shorter than the time after which the first stop is forgiven.
    reached = states((PERIOD_S, each) for each in seen)
    assert stops(reached) <= 1 + math.log2(1 + len(seen) * PERIOD_S / RULES.least_backoff_s)


def test_a_lender_that_stalls_every_five_seconds_is_left_alone_most_of_the_time() -> None:
    hour = round(3600 / PERIOD_S)
    stalls = np.random.default_rng(11).random(hour) < PERIOD_S / 5
    reached = states((PERIOD_S, STALLED if each else HEALTHY) for each in stalls)
    assert stalls.sum() > 600
    assert stops(reached) <= 2 * 3600 / RULES.most_backoff_s


@pytest.mark.parametrize("bearable", [0.2, 0.5, 0.9])
def test_the_limit_settles_below_what_the_lender_bears(bearable: float) -> None:
    # The lender's time per token rises with its borrowers, who take all that they may.
    bears_tokens = bearable * RULES.most_tokens
    state, used = first(RULES, 0.0), []
    for period in range(1, 2_000):
        excess = 0.15 * state.tokens / bears_tokens
        seen = replace(HEALTHY, used_tokens=state.tokens, tpot_s=0.02 * (1 + excess))
        state = after(state, seen, period * PERIOD_S)
        used.append(state.tokens)
    settled = used[1_000:]
    assert max(settled) <= bears_tokens + RULES.step_tokens
    assert min(settled) >= 0.3 * bears_tokens
