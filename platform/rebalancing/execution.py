"""Carries out the steps of a plan, one after the other, and measures what each has gained.

What is about to be done is saved before it is done, so that a restarted controller goes
on from there. A step that fails is taken back by its actuator and ends its plan; the steps before
it stand.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loomserve.platform.base.errors import RequestError
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Actuator, Progress
from loomserve.platform.rebalancing.plans.history import History, Transition
from loomserve.platform.rebalancing.plans.plans import Plan, PlanStatus, PlanStep, StepStatus
from loomserve.platform.rebalancing.policy.actions import Action, ActionKind, kind_of
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.limits import exceeded, unable
from loomserve.platform.rebalancing.policy.measured import Measured, listed
from loomserve.platform.rebalancing.policy.snapshot import Snapshot

_log = logging.getLogger("ray.serve")

_PATIENCE_S = 60.0
"""Time beyond what measuring takes at least, after which no fit measurement is expected."""
_OVERDUE = 3.0
"""A step is taken back after this many times its predicted duration or its budget, if longer."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One look at a plan's step that is under way or next."""

    history: History
    plan: Plan
    at: int
    now_s: float

    @property
    def step(self) -> PlanStep:
        return self.plan.steps[self.at]

    @property
    def name(self) -> str:
        return f"{self.plan.id}/{self.at}"

    def after(self, transition: Transition) -> _Turn:
        history = transition.history
        return _Turn(history, history.plan(self.plan.id), self.at, self.now_s)


class Execution:
    """Carries out one step at a time; keeps only what it has told actuators since it started."""

    def __init__(
        self,
        options: Rebalancing,
        actuators: Mapping[ActionKind, Actuator[Any]],
        observe: Callable[[], Measured],
        commit: Callable[[Transition], Awaitable[None]],
    ) -> None:
        """``observe`` returns the fleet as it is now; a transition counts once ``commit`` has saved
        it."""
        self._options, self._actuators = options, actuators
        self._observe, self._commit = observe, commit
        self._begun: set[str] = set()
        self._aborted: set[str] = set()
        self._waits_since: dict[str, float] = {}

    async def advance(self, history: History, plan: Plan, now_s: float, *, paused: bool) -> None:
        """Get on with a plan that runs or is being aborted, as far as that goes just now."""
        at = plan.next_step
        assert at is not None, "a plan without a step left has ended"
        turn = _Turn(history, plan, at, now_s)
        if turn.step.status is StepStatus.SETTLING:
            await self._measure(turn)
        elif turn.step.status is StepStatus.RUNNING:
            await self._watch(turn)
        elif not paused:
            await self._begin(turn)

    async def _begin(self, turn: _Turn) -> None:
        action, plan = turn.step.action, turn.plan
        measured = self._observe()
        flaws = measured.flaws(self._options)
        if measured.snapshot is None or (flaws and not plan.forced):
            since = self._waits_since.setdefault(turn.name, turn.now_s)
            if turn.now_s - since > self._longest_wait_s:
                await self._fail(turn, f"it could not be measured: {listed(flaws)}")
            return
        refusal = self._refusal(measured.snapshot, action, forced=plan.forced)
        if refusal is not None:
            await self._fail(turn, refusal)
            return
        try:
            record = self._actuators[kind_of(action)].prepare(turn.name, action)
        except (RequestError, KeyError) as error:
            await self._fail(turn, str(error))
            return
        begun = turn.history.step_begun(plan.id, turn.now_s, record, measured.snapshot.loads)
        await self._commit(begun)
        await self._tell(turn.after(begun))

    def _refusal(self, snapshot: Snapshot, action: Action, *, forced: bool) -> str | None:
        """Why the action cannot be done any more: much may have changed since it was planned."""
        try:
            refusal = unable(snapshot, action, self._options)
            if refusal is None and not forced:
                refusal = exceeded(snapshot, snapshot, apply(snapshot, action), self._options)
        except LookupError as error:
            return str(error.args[0])
        return None if refusal is None else f"{refusal.reason}: {refusal.detail}"

    async def _tell(self, turn: _Turn) -> bool:
        """Tell the actuator to begin, once in each life of this controller; whether it could."""
        if turn.name in self._begun:
            return True
        self._begun.add(turn.name)
        try:
            await self._actuator(turn).begin(turn.step.record)
        except Exception as error:
            await self._broke(turn, error)
            return False
        return True

    async def _watch(self, turn: _Turn) -> None:
        step = turn.step
        assert step.began is not None
        wanted = turn.plan.status is PlanStatus.RUNNING
        if wanted and not await self._tell(turn):
            return
        overdue = turn.now_s - step.began > self._longest_s(step)
        try:
            if (overdue or not wanted) and turn.name not in self._aborted:
                self._aborted.add(turn.name)
                await self._actuator(turn).abort(step.record)
            progress = await self._actuator(turn).progress(step.record)
        except Exception as error:
            await self._broke(turn, error)
            return
        await self._take(turn, progress, overdue=overdue)

    async def _take(self, turn: _Turn, said: Progress, *, overdue: bool) -> None:
        match said.outcome:
            case ActionOutcome.DONE:
                acted = turn.history.step_acted(
                    turn.plan.id, turn.now_s, said.moved_bytes, said.paused_s, said.message
                )
                await self._commit(acted)
            case ActionOutcome.FAILED | ActionOutcome.ABORTED:
                await self._fail(turn, "it took too long" if overdue else said.message)
            case ActionOutcome.RUNNING:
                pass

    async def _measure(self, turn: _Turn) -> None:
        step, id_ = turn.step, turn.plan.id
        assert step.acted is not None
        measured = self._observe()
        flaws = measured.flaws(self._options)
        if measured.snapshot is not None and not flaws:
            real = _real(step, measured.snapshot.loads)
            await self._commit(turn.history.step_done(id_, turn.now_s, real, measured.snapshot))
        elif turn.now_s - step.acted > self._longest_wait_s:
            done = turn.history.step_done(
                id_, turn.now_s, None, message=f"it could not be measured: {listed(flaws)}"
            )
            await self._commit(done)

    async def _broke(self, turn: _Turn, error: Exception) -> None:
        """The actuator itself failed: take back what there may be, and end the plan."""
        if not isinstance(error, RequestError):
            _log.exception("an action of %s could not be carried out", turn.plan.id, exc_info=error)
        try:
            await self._actuator(turn).abort(turn.step.record)
        except Exception as second:
            _log.warning("nor could it be taken back: %r", second)
        await self._fail(turn, str(error) or repr(error))

    async def _fail(self, turn: _Turn, why: str) -> None:
        await self._commit(turn.history.step_failed(turn.plan.id, turn.now_s, why))

    def _actuator(self, turn: _Turn) -> Actuator[Any]:
        return self._actuators[kind_of(turn.step.action)]

    @property
    def _longest_wait_s(self) -> float:
        return self._options.settle_s + self._options.stale_after_s + _PATIENCE_S

    def _longest_s(self, step: PlanStep) -> float:
        return _OVERDUE * max(self._options.duration_budget_s, step.predicted.duration_s)


def _real(step: PlanStep, loads: Mapping[str, float]) -> Forecast | None:
    """What the step gained and cost; None if one of its two devices is not there any more."""
    before = step.loads_before or {}
    if not {step.source, step.target} <= before.keys() & loads.keys():
        return None
    assert step.acted is not None
    assert step.began is not None
    gaps = [abs(each[step.source] - each[step.target]) for each in (before, loads)]
    took_s = max(step.acted - step.began, 0.0)
    return Forecast(gain=gaps[0] - gaps[1], cost_s=took_s, pause_s=step.paused_s, duration_s=took_s)
