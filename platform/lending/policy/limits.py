"""How much a lender may be used: a pure transition from one period's observation to the next.

Two things bound a lender: its own model must stay within its budget, and it must not make the
borrower's steps long. How near it is to either is its *pressure*: 1 at the limit. While it is open,
the context that the borrower may have there follows additive increase, multiplicative decrease. A
stall stops it at once; if the stall lasts, the requests there must be computed again elsewhere.
After a backoff, which doubles from one stop to the next, it is tried again with few requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

# Between this pressure and 1, the limit stays as it is, so that it does not swing.
_CALM = 0.7
_CALM_PERIODS = 3
# A lender that has been open for so many backoffs has made up for its stops.
_FORGIVEN = 10


class LoanPhase(StrEnum):
    """What a borrower does with a lender."""

    OPEN = "open"
    """It places requests with the lender, up to the limit."""
    STOPPED = "stopped"
    """It places no more; those that are there go on."""
    EJECT = "eject"
    """It places no more, and computes those that are there again elsewhere."""
    PROBING = "probing"
    """It places few requests, to see how they fare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The bounds that a lender must keep. ``most_tokens`` are those of borrowers' context that its
    memory can hold; by ``step_tokens`` the limit grows, and a lender is probed."""

    most_tokens: int
    step_tokens: int
    tpot_ratio: float = 1.15
    """The lender's p99 time per output token over its undisturbed one, at most."""
    slowdown: float = 1.5
    """The borrower's step over what it would take if the lender were never late, at most. More
    memory is worth some slowness, for more requests share a step; how much, placement weighs."""
    stall_s: float = 0.05
    """A task that waits so long is stalled. Observed as often, at least, a lender is stopped within
    twice that of its stall's begin: 0.1 s."""
    settle_s: float = 1.0  # between two decreases, so that the first one can show its effect
    eject_s: float = 0.5  # a stall that is seen later than this after a stop ejects the requests
    least_backoff_s: float = 1.0  # from the first stop to the next probe
    most_backoff_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What borrower and lender saw in one period."""

    tasks: int  # that the borrower has posted, served or not
    step_s: float  # of the borrower's steps
    late_s: float  # of these, waiting for the lender beyond what it computed
    worst_wait_s: float  # with the time that a task has been waiting so far
    used_tokens: int  # of the borrower's context in the lender's memory
    tpot_s: float | None = None  # p99 of the lender's time per output token; None: it has none
    undisturbed_tpot_s: float | None = None  # without borrowers, under the same load of its own


@dataclass(frozen=True, slots=True)
class LoanLimit:
    """How much one borrower may use one lender just now."""

    rules: Rules
    phase: LoanPhase
    tokens: int  # of context that the borrower may have there; 0 if it may place no request
    since_s: float  # when the phase began
    changed_s: float  # when tokens was last decreased
    backoff_s: float = 0.0  # from the last stop to the next probe; 0: no stop is held against it
    calm_periods: int = 0  # seen in a row, towards the next increase


def first(rules: Rules, now_s: float) -> LoanLimit:
    """Return the limit for a lender of which nothing is known: it is probed."""
    return _probed(LoanLimit(rules, LoanPhase.PROBING, 0, now_s, now_s), now_s)


def after(state: LoanLimit, seen: Observation, now_s: float) -> LoanLimit:
    """Return the limit once ``seen`` is known, at ``now_s`` of a clock that does not go back."""
    rules = state.rules
    if seen.tasks and seen.worst_wait_s >= rules.stall_s:
        return _stalled(state, now_s)
    if state.phase in (LoanPhase.STOPPED, LoanPhase.EJECT):
        waited = now_s - state.since_s >= state.backoff_s
        return _probed(state, now_s) if waited else state
    if state.phase is LoanPhase.OPEN and now_s - state.since_s >= _FORGIVEN * state.backoff_s:
        state = replace(state, backoff_s=0.0)
    strain = pressure(rules, seen)
    if strain is None:
        return state
    if strain > 1:
        return _decreased(state, seen, now_s)
    if strain > _CALM:
        return replace(state, calm_periods=0)
    return _calmer(state, seen, now_s)


def pressure(rules: Rules, seen: Observation) -> float | None:
    """Return the share that a loan uses of the lender's budget or of the borrower's, the greater. 1
    is the limit and 0 no disturbance at all; None: nothing was seen."""
    strains: list[float] = []
    if seen.tpot_s is not None and seen.undisturbed_tpot_s:
        excess = seen.tpot_s / seen.undisturbed_tpot_s - 1
        strains.append(max(excess, 0.0) / (rules.tpot_ratio - 1))
    if seen.tasks and seen.step_s:
        in_time_s = seen.step_s - seen.late_s
        excess = seen.late_s / in_time_s if in_time_s > 0 else math.inf
        strains.append(excess / (rules.slowdown - 1))
    return max(strains, default=None)


def _stalled(state: LoanLimit, now_s: float) -> LoanLimit:
    if state.phase in (LoanPhase.OPEN, LoanPhase.PROBING):
        return _stopped(state, now_s)
    if state.phase is LoanPhase.STOPPED and now_s - state.since_s >= state.rules.eject_s:
        return replace(state, phase=LoanPhase.EJECT, since_s=now_s)
    return state


def _stopped(state: LoanLimit, now_s: float) -> LoanLimit:
    rules = state.rules
    backoff_s = min(max(2 * state.backoff_s, rules.least_backoff_s), rules.most_backoff_s)
    return replace(
        state, phase=LoanPhase.STOPPED, tokens=0, since_s=now_s, backoff_s=backoff_s, calm_periods=0
    )


def _probed(state: LoanLimit, now_s: float) -> LoanLimit:
    tokens = min(state.rules.step_tokens, state.rules.most_tokens)
    return replace(
        state,
        phase=LoanPhase.PROBING,
        tokens=tokens,
        since_s=now_s,
        changed_s=now_s,
        calm_periods=0,
    )


def _decreased(state: LoanLimit, seen: Observation, now_s: float) -> LoanLimit:
    """Halve what is used; stop if the fewest requests already strain the lender."""
    state = replace(state, calm_periods=0)
    if now_s - state.changed_s < state.rules.settle_s:
        return state
    least = min(state.rules.step_tokens, state.rules.most_tokens)
    if state.tokens <= least:
        return _stopped(state, now_s)
    tokens = max(min(state.tokens, seen.used_tokens) // 2, least)
    return replace(state, tokens=tokens, changed_s=now_s)


def _calmer(state: LoanLimit, seen: Observation, now_s: float) -> LoanLimit:
    """After enough calm periods, open, or raise a limit that is more than half used by a step."""
    if not seen.tasks:
        return state
    if state.calm_periods + 1 < _CALM_PERIODS:
        return replace(state, calm_periods=state.calm_periods + 1)
    state = replace(state, calm_periods=0)
    if state.phase is LoanPhase.PROBING:
        return replace(state, phase=LoanPhase.OPEN, since_s=now_s)
    if 2 * seen.used_tokens < state.tokens:
        return state
    tokens = min(state.tokens + state.rules.step_tokens, state.rules.most_tokens)
    return replace(state, tokens=tokens)


_STEPS = 128
_ANSWER = 32
"""Tokens of a short answer. The time per output token is the mean over an answer, so one slow step
does not make an answer slow."""


class LenderStepTimes(NamedTuple):
    """p99 of recent answers' seconds per output token: measured, and without borrowers' tasks."""

    disturbed_s: float
    undisturbed_s: float


IDLE = LenderStepTimes(1.0, 1.0)
"""The times of a lender without requests, which borrowers cannot disturb."""


class ServedTime:
    """The lender's recent steps, each with the time that borrowers' tasks took of it. A step
    without borrowers would take its time less that of the tasks served within it, since looking for
    tasks takes less than a microsecond."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def add(self, step_s: float, served_s: float) -> None:
        """Add a step of ``step_s`` seconds, ``served_s`` of which went to borrowers' tasks."""
        self._steps.append((step_s, max(0.0, step_s - served_s)))

    def p99(self) -> LenderStepTimes | None:
        """Return the p99 of both; None until there are enough steps to tell."""
        if len(self._steps) < _STEPS // 2:
            return None
        disturbed_s, own_s = zip(*self._steps, strict=True)
        return LenderStepTimes(_slowest_answer(disturbed_s), _slowest_answer(own_s))


def _slowest_answer(steps_s: Iterable[float]) -> float:
    """Return the p99 of the means over runs of steps, each as long as a short answer."""
    ends = list(accumulate(steps_s, initial=0.0))
    means = sorted(
        (end - begin) / _ANSWER for begin, end in zip(ends, ends[_ANSWER:], strict=False)
    )
    return means[-(-99 * len(means) // 100) - 1]
