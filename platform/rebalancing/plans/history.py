"""What became of the latest plans, and what was learnt from them; values, changed by copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.rebalancing.plans.plans import (
    ACTIVE,
    Origin,
    Plan,
    PlanStatus,
    PlanStep,
    StepStatus,
    spread,
)
from loomserve.platform.rebalancing.policy.actions import kind_of
from loomserve.platform.rebalancing.policy.correction import Corrections
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.snapshot import Snapshot


class History(BaseModel):
    """The latest plans, the newest last, and what was learnt; kept over a restart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plans: tuple[Plan, ...] = ()
    corrections: Corrections = Corrections()
    most: int = Field(100, ge=1, description="Plans that are remembered.")

    def plan(self, id_: str) -> Plan:
        """
        Raises:
            NotFound: there is no such plan, or it was long ago.
        """
        for plan in self.plans:
            if plan.id == id_:
                return plan
        raise NotFound(f"there is no plan {id_!r}; list the plans to see which there are")

    @property
    def running(self) -> Plan | None:
        return next((plan for plan in self.plans if plan.status in ACTIVE), None)

    def waiting(self, origin: Origin) -> Plan | None:
        """The newest that was proposed and has not begun."""
        proposed = (
            plan
            for plan in reversed(self.plans)
            if plan.status is PlanStatus.PROPOSED and plan.origin is origin
        )
        return next(proposed, None)

    def propose(self, plan: Plan) -> History:
        """With a new plan, which replaces those of its origin that have not begun.

        Raises:
            Conflict: a plan runs, and what it was made of no longer holds.
        """
        self._refuse_if_running()
        plans = self.withdraw(plan.origin).plans
        return self.model_copy(update={"plans": (*plans, plan)[-self.most :]})

    def withdraw(self, origin: Origin) -> History:
        """Without the plans of this origin that have not begun."""
        plans = (
            _ended(each, PlanStatus.REPLACED)
            if each.status is PlanStatus.PROPOSED and each.origin is origin
            else each
            for each in self.plans
        )
        return self.model_copy(update={"plans": tuple(plans)})

    def start(self, id_: str) -> History:
        """
        Raises:
            NotFound: see :meth:`plan`.
            Conflict: it has begun or ended already, or another one runs.
        """
        plan = self.plan(id_)
        if plan.status is not PlanStatus.PROPOSED:
            raise Conflict(f"plan {id_!r} is {plan.status}; only a proposed plan can be started")
        self._refuse_if_running()
        return self._with(plan.model_copy(update={"status": PlanStatus.RUNNING}))

    def step_begun(
        self, id_: str, order: Mapping[str, Any], at_s: float, loads: Mapping[str, float]
    ) -> History:
        """The next step is about to be carried out.

        Raises:
            NotFound, Conflict: as :meth:`step_done`.
        """
        return self._step(
            id_, status=StepStatus.RUNNING, order=dict(order), began=at_s, loads_before=dict(loads)
        )

    def step_moves(self, id_: str, order: Mapping[str, Any]) -> History:
        """Its mechanism has got on, and must not forget how far.

        Raises:
            NotFound, Conflict: as :meth:`step_done`.
        """
        return self._step(id_, order=dict(order))

    def step_acted(self, id_: str, at_s: float, moved_bytes: int, paused_s: float) -> History:
        """The step was carried out; what it gained is to be measured.

        Raises:
            NotFound, Conflict: as :meth:`step_done`.
        """
        return self._step(
            id_,
            status=StepStatus.SETTLING,
            acted=at_s,
            moved_bytes=moved_bytes,
            paused_s=paused_s,
        )

    def step_done(
        self,
        id_: str,
        real: Forecast | None,
        loads: Mapping[str, float] | None = None,
        at_s: float | None = None,
    ) -> History:
        """The running plan's next step was carried out; corrections learn from it.

        ``real`` is None if nothing could be measured.

        Raises:
            NotFound: see :meth:`plan`.
            Conflict: the plan does not run, or has no step left.
        """
        plan, at = self._at_step(id_)
        step = plan.steps[at]
        after = self._step(
            id_, status=StepStatus.DONE, real=real, loads_after=dict(loads) if loads else None
        )
        changed = after.plan(id_)
        if plan.status is PlanStatus.ABORTING:
            after = after._with(_ended(changed, PlanStatus.CANCELLED, at_s))
        elif at + 1 == len(plan.steps):
            after = after._with(_ended(changed, PlanStatus.DONE, at_s))
        if real is None:
            return after
        corrections = self.corrections.learn(
            kind_of(step.action), step.source, step.target, step.raw, real
        )
        return after.model_copy(update={"corrections": corrections})

    def step_failed(self, id_: str, message: str, at_s: float | None = None) -> History:
        """The running plan's next step was rolled back; the plan ends with it.

        Raises:
            NotFound, Conflict: as :meth:`step_done`.
        """
        aborted = self.plan(id_).status is PlanStatus.ABORTING
        status = StepStatus.ABORTED if aborted else StepStatus.FAILED
        after = self._step(id_, status=status, message=message)
        ended = PlanStatus.CANCELLED if aborted else PlanStatus.FAILED
        return after._with(_ended(after.plan(id_), ended, at_s))

    def abort(self, id_: str, at_s: float | None = None) -> History:
        """Begin no step of the plan any more; one that is under way has to end first.

        Raises:
            NotFound: see :meth:`plan`.
            Conflict: it has ended, or is being aborted already.
        """
        plan = self.plan(id_)
        if plan.status not in (PlanStatus.PROPOSED, PlanStatus.RUNNING):
            raise Conflict(f"plan {id_!r} is {plan.status} already")
        at = plan.next_step
        if at is None or plan.steps[at].status is StepStatus.PENDING:
            return self._with(_ended(plan, PlanStatus.CANCELLED, at_s))
        return self._with(plan.model_copy(update={"status": PlanStatus.ABORTING}))

    def settled(self, id_: str, snapshot: Snapshot) -> History:
        """What the plan has gained, from a snapshot of after it.

        Raises:
            NotFound: see :meth:`plan`.
        """
        plan = self.plan(id_)
        gain = plan.spread - spread(snapshot)
        return self._with(plan.model_copy(update={"real_gain": gain}))

    def _refuse_if_running(self) -> None:
        if self.running is not None:
            raise Conflict(f"plan {self.running.id!r} runs; wait until it has ended, or abort it")

    def _step(self, id_: str, **changes: object) -> History:
        plan, at = self._at_step(id_)
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
