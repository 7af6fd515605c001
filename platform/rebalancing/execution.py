"""Carries out the steps of a plan, one after the other, and measures what each has gained.

What is about to be done is saved before it is done, so that a controller after this one goes on
from there. A step that fails is taken back by its mover and ends its plan; those before it stand.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from loomserve.platform.base.errors import RequestError
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Actuator, Progress
from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.plans import Plan, PlanStatus, PlanStep, StepStatus
from loomserve.platform.rebalancing.plans.reports import Event, EventKind
from loomserve.platform.rebalancing.policy.actions import Action, ActionKind, kind_of
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.limits import exceeded, unable
from loomserve.platform.rebalancing.policy.snapshot import Flaw, Measured, Snapshot, utilisations

_log = logging.getLogger("ray.serve")

_PATIENCE_S = 60.0
"""Beyond what measuring takes at least: then nothing fit to decide on will come."""
_OVERDUE = 3.0
"""Times the longer of its prediction and its budget, after which a step is taken back."""

Commit = Callable[[History, Event, float | None], Awaitable[None]]
"""Saves; the last argument is when something was changed, or None."""


class Execution:
    """One step at a time; it remembers only what it has told movers since it started."""

    def __init__(
        self,
        options: Rebalancing,
        movers: Mapping[ActionKind, Actuator],
        observe: Callable[[], Measured],
        commit: Commit,
    ) -> None:
        self._options, self._movers = options, movers
        self._observe, self._commit = observe, commit
        self._begun: set[str] = set()
        self._aborted: set[str] = set()
        self._waits_since: dict[str, float] = {}

    async def advance(self, history: History, plan: Plan, now_s: float, *, paused: bool) -> None:
        """Get on with a plan that runs or is being aborted, as far as that goes just now."""
        at = plan.next_step
        assert at is not None, "a plan without a step left has ended"
        step = plan.steps[at]
        if step.status is StepStatus.SETTLING:
            await self._measure(history, plan, at, now_s)
        elif step.status is StepStatus.RUNNING:
            await self._watch(history, plan, at, now_s)
        elif not paused:
            await self._begin(history, plan, at, now_s)

    async def _begin(self, history: History, plan: Plan, at: int, now_s: float) -> None:
        action, name = plan.steps[at].action, _name(plan, at)
        measured = self._observe()
        flaws = measured.flaws(self._options)
        if measured.snapshot is None or (flaws and not plan.forced):
            since = self._waits_since.setdefault(name, now_s)
            if now_s - since > self._longest_wait_s:
                await self._fail(history, plan, at, now_s, _said(flaws))
            return
        refusal = self._refusal(measured.snapshot, action, forced=plan.forced)
        if refusal is not None:
            await self._fail(history, plan, at, now_s, refusal)
            return
        try:
            mover = self._movers[kind_of(action)]
            order = mover.order(name, action)
        except (RequestError, KeyError) as error:
            await self._fail(history, plan, at, now_s, str(error))
            return
        loads = utilisations(measured.snapshot)
        history = history.step_begun(plan.id, order, now_s, loads)
        await self._commit(history, self._event(EventKind.BEGUN, history, plan, at, now_s), None)
        await self._tell(history, plan, at, now_s)

    def _refusal(self, snapshot: Snapshot, action: Action, *, forced: bool) -> str | None:
        """Why the action cannot be any more: much may have changed since it was planned."""
        try:
            refusal = unable(snapshot, action, self._options)
            if refusal is None and not forced:
                refusal = exceeded(snapshot, snapshot, apply(snapshot, action), self._options)
        except LookupError as error:
            return str(error.args[0])
        return None if refusal is None else f"{refusal.reason}: {refusal.detail}"

    async def _tell(self, history: History, plan: Plan, at: int, now_s: float) -> bool:
        """Begin, or begin again after a restart; whether it could be."""
        step, name = history.plan(plan.id).steps[at], _name(plan, at)
        if name in self._begun:
            return True
        assert step.order is not None
        self._begun.add(name)
        try:
            await self._movers[kind_of(step.action)].begin(step.order)
        except Exception as error:
            await self._broke(history, plan, at, now_s, error)
            return False
        return True

    async def _watch(self, history: History, plan: Plan, at: int, now_s: float) -> None:
        step, name = plan.steps[at], _name(plan, at)
        assert step.order is not None
        assert step.began is not None
        wanted = plan.status is PlanStatus.RUNNING
        if wanted and not await self._tell(history, plan, at, now_s):
            return
        mover = self._movers[kind_of(step.action)]
        overdue = now_s - step.began > self._longest_s(step)
        try:
            if (overdue or not wanted) and name not in self._aborted:
                self._aborted.add(name)
                await mover.abort(step.order)
            progress = await mover.progress(step.order)
        except Exception as error:
            await self._broke(history, plan, at, now_s, error)
            return
        await self._take(history, plan, at, now_s, progress, overdue=overdue)

    async def _take(
        self, history: History, plan: Plan, at: int, now_s: float, said: Progress, *, overdue: bool
    ) -> None:
        if said.order is not None and said.order != plan.steps[at].order:
            history = history.step_moves(plan.id, said.order)
            moved = self._event(EventKind.BEGUN, history, plan, at, now_s, said.message)
            await self._commit(history, moved, None)
        match said.outcome:
            case ActionOutcome.DONE:
                history = history.step_acted(plan.id, now_s, said.moved_bytes, said.paused_s)
                message = said.message or "carried out; its gain is about to be measured"
                event = self._event(EventKind.BEGUN, history, plan, at, now_s, message)
                await self._commit(history, event, now_s)
            case ActionOutcome.FAILED | ActionOutcome.ABORTED:
                message = "it took too long" if overdue else said.message
                await self._fail(history, plan, at, now_s, message)
            case ActionOutcome.RUNNING:
                pass

    async def _measure(self, history: History, plan: Plan, at: int, now_s: float) -> None:
        step = plan.steps[at]
        assert step.acted is not None
        assert step.began is not None
        measured = self._observe()
        flaws = measured.flaws(self._options)
        if measured.snapshot is None or flaws:
            if now_s - step.acted <= self._longest_wait_s:
                return
            history = history.step_done(plan.id, None, at_s=now_s)
            event = self._event(EventKind.DONE, history, plan, at, now_s, _said(flaws))
            await self._commit(history, event, None)
            return
        loads = utilisations(measured.snapshot)
        real = _real(step, loads)
        history = history.step_done(plan.id, real, loads, at_s=now_s)
        if history.plan(plan.id).next_step is None:
            history = history.settled(plan.id, measured.snapshot)
        await self._commit(history, self._event(EventKind.DONE, history, plan, at, now_s), None)

    async def _broke(
        self, history: History, plan: Plan, at: int, now_s: float, error: Exception
    ) -> None:
        """The mover itself failed: take back what there may be, and end the plan."""
        step = history.plan(plan.id).steps[at]
        if not isinstance(error, RequestError):
            _log.exception("an action of %s could not be carried out", plan.id, exc_info=error)
        try:
            await self._movers[kind_of(step.action)].abort(step.order or {})
        except Exception as second:
            _log.warning("nor could it be taken back: %r", second)
        await self._fail(history, plan, at, now_s, str(error) or repr(error))

    async def _fail(self, history: History, plan: Plan, at: int, now_s: float, why: str) -> None:
        aborted = plan.status is PlanStatus.ABORTING
        history = history.step_failed(plan.id, why, now_s)
        kind = EventKind.ABORTED if aborted else EventKind.FAILED
        event = self._event(kind, history, plan, at, now_s, why)
        # What was taken back has changed the loads as well.
        changed = now_s if history.plan(plan.id).steps[at].order is not None else None
        await self._commit(history, event, changed)

    def _event(
        self,
        kind: EventKind,
        history: History,
        plan: Plan,
        at: int,
        now_s: float,
        message: str = "",
    ) -> Event:
        step = history.plan(plan.id).steps[at]
        return Event(
            at=now_s,
            kind=kind,
            plan=plan.id,
            step=at,
            action=step.action,
            loads_before=step.loads_before,
            loads_after=step.loads_after,
            message=message,
        )

    @property
    def _longest_wait_s(self) -> float:
        return self._options.settle_s + self._options.stale_after_s + _PATIENCE_S

    def _longest_s(self, step: PlanStep) -> float:
        return _OVERDUE * max(self._options.duration_budget_s, step.predicted.duration_s)


def _real(step: PlanStep, loads: Mapping[str, float]) -> Forecast | None:
    """What the step gained and cost, as far as its two devices are still there."""
    before = step.loads_before or {}
    if not {step.source, step.target} <= before.keys() & loads.keys():
        return None
    assert step.acted is not None
    assert step.began is not None
    gaps = [abs(each[step.source] - each[step.target]) for each in (before, loads)]
    took_s = max(step.acted - step.began, 0.0)
    return Forecast(gain=gaps[0] - gaps[1], cost_s=took_s, pause_s=step.paused_s, duration_s=took_s)


def _name(plan: Plan, at: int) -> str:
    return f"{plan.id}/{at}"


def _said(flaws: tuple[Flaw, ...]) -> str:
    subjects = ", ".join(f"{flaw.subject} ({flaw.why})" for flaw in flaws)
    return f"it could not be measured: {subjects}"
