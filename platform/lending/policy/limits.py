"""How much a lender may be used: a pure transition from one period's observation to the next.

Two things bound a lender: its own model must stay within its budget, and it must not make the
borrower's steps long. How near it is to either is its *pressure*: 1 at the limit. While it is open,
the context that the borrower may have there follows additive increase, multiplicative decrease. A
stall stops it at once; if the stall lasts, the requests there must be computed again elsewhere.
After a backoff, which doubles from one stop to the next, it is tried again with few requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

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
    """The bounds that a lender must keep.

    Attributes:
        most_tokens: Of borrowers' context that its memory can hold.
        step_tokens: By which the limit grows, and with which a lender is probed.
        tpot_ratio: The lender's p99 time per output token over its undisturbed one, at most.
        slowdown: The borrower's step over what it would take if the lender were never late, at
            most. More memory is worth some slowness, for more requests share a step; how much,
            placement weighs for each of them. A few requests are attended to in less
            time than they wait, so the step tells what a wait costs.
        stall_s: A task that waits so long is stalled. Observed as often, at least, a lender is
            stopped within twice that of its stall's begin: 0.1 s.
        settle_s: Between two decreases, so that the first one can show its effect.
        eject_s: A stall that is seen later than this after a stop ejects the requests.
        least_backoff_s: From the first stop to the next probe.
        most_backoff_s: The longest from any stop to the next probe.
    """

    most_tokens: int
    step_tokens: int
    tpot_ratio: float = 1.15
    slowdown: float = 1.5
    stall_s: float = 0.05
    settle_s: float = 1.0
    eject_s: float = 0.5
    least_backoff_s: float = 1.0
    most_backoff_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What borrower and lender saw in one period. Without tasks the first four count for nothing.

    Attributes:
        tasks: That the borrower has posted, served or not.
        step_s: Seconds of the borrower's steps.
        late_s: Of these, seconds of waiting for the lender beyond what it computed.
        worst_wait_s: The longest wait, the time that a task has been waiting so far included.
        timed_out: Whether the borrower gave a task up.
        used_tokens: Of the borrower's context in the lender's memory.
        tpot_s: p99 of the lender's own time per output token; None if it generated none.
        undisturbed_tpot_s: The same without borrowers, under the same load of its own.
    """

    tasks: int
    step_s: float
    late_s: float
    worst_wait_s: float
    timed_out: bool
    used_tokens: int
    tpot_s: float | None = None
    undisturbed_tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoanLimit:
    """How much one borrower may use one lender just now.

    Attributes:
        rules: Bounds, which never change.
        phase: What the borrower does with the lender.
        tokens: Of context that the borrower may have there; 0 if it may place no request.
        since_s: When the phase began.
        changed_s: When ``tokens`` was last decreased.
        backoff_s: From the last stop to the next probe; 0 if no stop is held against the lender.
        calm_periods: Seen in a row, towards the next increase.
    """

    rules: Rules
    phase: LoanPhase
    tokens: int
    since_s: float
    changed_s: float
    backoff_s: float = 0.0
    calm_periods: int = 0


def first(rules: Rules, now_s: float) -> LoanLimit:
    """Return the limit for a lender of which nothing is known: it is probed."""
    return _probed(LoanLimit(rules, LoanPhase.PROBING, 0, now_s, now_s), now_s)


def after(state: LoanLimit, seen: Observation, now_s: float) -> LoanLimit:
    """Return the limit once ``seen`` is known, at ``now_s`` of a clock that does not go back."""
    rules = state.rules
    if seen.timed_out or (seen.tasks and seen.worst_wait_s >= rules.stall_s):
        return _stalled(state, seen.timed_out, now_s)
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
    """Return the share that a loan uses of the lender's budget or of the borrower's, the greater.

    1 is the limit and 0 no disturbance at all; None: nothing was seen.
    """
    strains: list[float] = []
    if seen.tpot_s is not None and seen.undisturbed_tpot_s:
        excess = seen.tpot_s / seen.undisturbed_tpot_s - 1
        strains.append(max(excess, 0.0) / (rules.tpot_ratio - 1))
    if seen.tasks and seen.step_s:
        in_time_s = seen.step_s - seen.late_s
        excess = seen.late_s / in_time_s if in_time_s > 0 else math.inf
        strains.append(excess / (rules.slowdown - 1))
    return max(strains, default=None)


def _stalled(state: LoanLimit, timed_out: bool, now_s: float) -> LoanLimit:
    if state.phase in (LoanPhase.OPEN, LoanPhase.PROBING):
        return _stopped(state, LoanPhase.EJECT if timed_out else LoanPhase.STOPPED, now_s)
    lasts = now_s - state.since_s >= state.rules.eject_s
    if state.phase is LoanPhase.STOPPED and (timed_out or lasts):
        return replace(state, phase=LoanPhase.EJECT, since_s=now_s)
    return state


def _stopped(state: LoanLimit, phase: LoanPhase, now_s: float) -> LoanLimit:
    rules = state.rules
    backoff_s = min(max(2 * state.backoff_s, rules.least_backoff_s), rules.most_backoff_s)
    return replace(state, phase=phase, tokens=0, since_s=now_s, backoff_s=backoff_s, calm_periods=0)


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
        return _stopped(state, LoanPhase.STOPPED, now_s)
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
