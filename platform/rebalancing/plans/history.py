"""The latest plans and what was learnt from them.

A history is a value. Each transition of a plan is one method, which returns the history after it
together with the event that tells of it, so that both are saved at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.plans.plans import (
    ACTIVE,
    AnyRecord,
    Origin,
    Plan,
    PlanStatus,
    PlanStep,
    StepStatus,
    spread,
)
from loomserve.platform.rebalancing.plans.reports import Event, EventKind
from loomserve.platform.rebalancing.policy.actions import kind_of
from loomserve.platform.rebalancing.policy.forecast import Corrections, Forecast
from loomserve.platform.rebalancing.policy.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Transition:
    """A history after one change, and the event that operators read. With ``changes_loads``,
    devices' older measurements do not count any more."""

    history: History
    event: Event
    changes_loads: bool = False


class History(Frozen):
    """The latest plans, the newest last, and corrections learnt from them; outlives a restart."""

    plans: tuple[Plan, ...] = ()
    corrections: Corrections = Corrections()
    most: int = Field(100, ge=1, description="Plans that are remembered.")

    def plan(self, id_: str) -> Plan:
        """Raises NotFound if the id is unknown, or its plan was evicted from the history."""
        for plan in self.plans:
            if plan.id == id_:
                return plan
        raise NotFound(f"there is no plan {id_!r}; list the plans to see which there are")

    @property
    def running(self) -> Plan | None:
        return next((plan for plan in self.plans if plan.status in ACTIVE), None)

    def waiting(self, origin: Origin) -> Plan | None:
        """The newest plan of this origin that was proposed and has not begun."""
        proposed = (
            plan
            for plan in reversed(self.plans)
            if plan.status is PlanStatus.PROPOSED and plan.origin is origin
        )
        return next(proposed, None)

    # Transitions of a plan

    def propose(self, plan: Plan, at_s: float) -> Transition:
        """Add a new plan, which replaces those of its origin that have not begun. Raises Conflict
        if a plan runs, and changes what the new one was made of."""
        self._refuse_if_running()
        plans = self.withdraw(plan.origin).plans
        history = self.model_copy(update={"plans": (*plans, plan)[-self.most :]})
        return history._told(EventKind.PROPOSED, plan.id, at_s)

    def withdraw(self, origin: Origin) -> History:
        """Replace the plans of this origin that have not begun by nothing; no event tells of it."""
        plans = (
            _ended(each, PlanStatus.REPLACED)
            if each.status is PlanStatus.PROPOSED and each.origin is origin
            else each
            for each in self.plans
        )
        return self.model_copy(update={"plans": tuple(plans)})

    def start(self, id_: str, at_s: float) -> Transition:
        """Begin a proposed plan. Raises NotFound as :meth:`plan`; Conflict if it has begun or ended
        already, or another one runs."""
        plan = self.plan(id_)
        if plan.status is not PlanStatus.PROPOSED:
            raise Conflict(f"plan {id_!r} is {plan.status}; only a proposed plan can be started")
        self._refuse_if_running()
        history = self._with(plan.model_copy(update={"status": PlanStatus.RUNNING}))
        return history._told(EventKind.STARTED, id_, at_s)

    def abort(self, id_: str, at_s: float) -> Transition:
        """Begin no step of the plan any more; a step that is under way has to end first. Raises
        NotFound as :meth:`plan`; Conflict if it has ended, or is being aborted already."""
        plan = self.plan(id_)
        if plan.status not in (PlanStatus.PROPOSED, PlanStatus.RUNNING):
            raise Conflict(f"plan {id_!r} is {plan.status} already")
        at = plan.next_step
        if at is None or plan.steps[at].status is StepStatus.PENDING:
            history = self._with(_ended(plan, PlanStatus.CANCELLED, at_s))
        else:
            history = self._with(plan.model_copy(update={"status": PlanStatus.ABORTING}))
        return history._told(EventKind.ABORTED, id_, at_s)

    # Transitions of the running plan's next step

    def step_begun(
        self, id_: str, at_s: float, record: AnyRecord, loads: Mapping[str, float]
    ) -> Transition:
        """The step is about to be carried out; ``loads`` are the devices' just now. Raises as
        :meth:`step_done`."""
        plan, at = self._at_step(id_)
        history = self._step(
            plan, at, status=StepStatus.RUNNING, record=record, began=at_s, loads_before=dict(loads)
        )
        return history._told(EventKind.BEGUN, id_, at_s, at)

    def step_acted(
        self, id_: str, at_s: float, moved_bytes: int, paused_s: float, message: str
    ) -> Transition:
        """The step was carried out; its gain is to be measured. Raises as :meth:`step_done`."""
        plan, at = self._at_step(id_)
        history = self._step(
            plan,
            at,
            status=StepStatus.SETTLING,
            acted=at_s,
            moved_bytes=moved_bytes,
            paused_s=paused_s,
        )
        told = message or "carried out; its gain is about to be measured"
        return history._told(EventKind.BEGUN, id_, at_s, at, told, changes_loads=True)

    def step_done(
        self,
        id_: str,
        at_s: float,
        real: Forecast | None,
        measured: Snapshot | None = None,
        message: str = "",
    ) -> Transition:
        """The step was carried out; corrections learn from it, and the last one ends the plan.
        ``real``: what the step gained and cost, None: nothing could be measured; ``measured``: the
        snapshot after it. Raises NotFound as :meth:`plan`; Conflict if the plan does not run, or
        has no step left."""
        plan, at = self._at_step(id_)
        step = plan.steps[at]
        loads = None if measured is None else measured.loads
        history = self._step(plan, at, status=StepStatus.DONE, real=real, loads_after=loads)
        aborting = plan.status is PlanStatus.ABORTING
        if aborting or at + 1 == len(plan.steps):
            status = PlanStatus.CANCELLED if aborting else PlanStatus.DONE
            ended = _ended(history.plan(id_), status, at_s)
            if measured is not None:
                ended = ended.model_copy(update={"real_gain": plan.spread - spread(measured)})
            history = history._with(ended)
        if real is not None:
            corrections = self.corrections.learn(
                kind_of(step.action), step.source, step.target, step.raw, real
            )
            history = history.model_copy(update={"corrections": corrections})
        return history._told(EventKind.DONE, id_, at_s, at, message)

    def step_failed(self, id_: str, at_s: float, why: str) -> Transition:
        """The step was not begun, or was taken back; the plan ends with it. Raises as
        :meth:`step_done`."""
        plan, at = self._at_step(id_)
        aborting = plan.status is PlanStatus.ABORTING
        status = StepStatus.ABORTED if aborting else StepStatus.FAILED
        history = self._step(plan, at, status=status, message=why)
        ended = PlanStatus.CANCELLED if aborting else PlanStatus.FAILED
        history = history._with(_ended(history.plan(id_), ended, at_s))
        kind = EventKind.ABORTED if aborting else EventKind.FAILED
        # What was begun and taken back has changed the loads as well.
        begun = plan.steps[at].record is not None
        return history._told(kind, id_, at_s, at, why, changes_loads=begun)

    def _told(
        self,
        kind: EventKind,
        id_: str,
        at_s: float,
        at: int | None = None,
        message: str = "",
        *,
        changes_loads: bool = False,
    ) -> Transition:
        """This history with the event of a plan, or of its step ``at``."""
        event = Event(at=at_s, kind=kind, plan=id_, message=message)
        if at is not None:
            step = self.plan(id_).steps[at]
            event = event.model_copy(
                update={
                    "step": at,
                    "action": step.action,
                    "loads_before": step.loads_before,
                    "loads_after": step.loads_after,
                }
            )
        return Transition(self, event, changes_loads)

    def _refuse_if_running(self) -> None:
        if self.running is not None:
            raise Conflict(f"plan {self.running.id!r} runs; wait until it has ended, or abort it")

    def _step(self, plan: Plan, at: int, **changes: object) -> History:
        steps: list[PlanStep] = list(plan.steps)
        steps[at] = steps[at].model_copy(update=changes)
        return self._with(plan.model_copy(update={"steps": tuple(steps)}))

    def _at_step(self, id_: str) -> tuple[Plan, int]:
        plan = self.plan(id_)
        at = plan.next_step
        if plan.status not in ACTIVE or at is None:
            raise Conflict(f"plan {id_!r} is {plan.status}; none of its steps is under way")
        return plan, at

    def _with(self, plan: Plan) -> History:
        plans = tuple(plan if each.id == plan.id else each for each in self.plans)
        return self.model_copy(update={"plans": plans})


def _ended(plan: Plan, status: PlanStatus, at_s: float | None = None) -> Plan:
    steps = (
        each.model_copy(update={"status": StepStatus.LEFT})
        if each.status is StepStatus.PENDING
        else each
        for each in plan.steps
    )
    return plan.model_copy(update={"steps": tuple(steps), "status": status, "ended": at_s})
