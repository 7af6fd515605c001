"""Plans as an operator sees them, and what became of them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.errors import Conflict, NotFound
from loomserve.platform.rebalancing.actions import Action, kind_of
from loomserve.platform.rebalancing.correction import Corrections
from loomserve.platform.rebalancing.forecast import Forecast
from loomserve.platform.rebalancing.limits import Reason
from loomserve.platform.rebalancing.planner import Proposal
from loomserve.platform.rebalancing.snapshot import Snapshot, utilisations


class PlanStatus(StrEnum):
    PROPOSED = "proposed"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # an action was rolled back; those before it stand, those after it were left
    REPLACED = "replaced"  # by a newer plan, before it began
    CANCELLED = "cancelled"  # by an operator, before it began or between two of its actions


class StepStatus(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    LEFT = "left"


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanStep(_Object):
    action: Action
    source: str = Field(description="The hot device for which it was chosen.")
    target: str = Field(description="The cold one.")
    raw: Forecast = Field(description="As predicted from measurements alone.")
    predicted: Forecast = Field(description="Corrected by actions of its kind before.")
    status: StepStatus = StepStatus.PENDING
    real: Forecast | None = Field(None, description="As measured, once it is done.")
    message: str = Field("", description="Why it failed, for a person.")


class RejectedStep(_Object):
    action: Action
    source: str
    target: str
    reason: Reason
    detail: str


class Plan(_Object):
    id: str
    created: float = Field(description="Unix time, seconds.")
    status: PlanStatus = PlanStatus.PROPOSED
    steps: tuple[PlanStep, ...]
    rejected: tuple[RejectedStep, ...]
    predicted: Forecast = Field(
        description="Of all steps; its gain is of the most and the least loaded device's gap."
    )
    spread: float = Field(description="That gap when the plan was made.")
    real_gain: float | None = Field(None, description="Measured once the plan has ended.")

    @property
    def next_step(self) -> int | None:
        """The place of the step to carry out next; None if there is none or it has ended."""
        if self.status not in (PlanStatus.PROPOSED, PlanStatus.RUNNING):
            return None
        pending = (at for at, x in enumerate(self.steps) if x.status is StepStatus.PENDING)
        return next(pending, None)


def spread(snapshot: Snapshot) -> float:
    """The most loaded device's utilisation over that of the least loaded."""
    loads = utilisations(snapshot).values()
    return max(loads) - min(loads)


def plan_of(id_: str, created: float, before: Snapshot, proposal: Proposal) -> Plan | None:
    """None if the proposal does nothing."""
    if not proposal.chosen:
        return None
    forecasts = [each.forecast for each in proposal.chosen]
    return Plan(
        id=id_,
        created=created,
        steps=tuple(
            PlanStep(
                action=each.action,
                source=each.source,
                target=each.target,
                raw=each.raw,
                predicted=each.forecast,
            )
            for each in proposal.chosen
        ),
        rejected=tuple(
            RejectedStep(
                action=each.action,
                source=each.source,
                target=each.target,
                reason=each.refusal.reason,
                detail=each.refusal.detail,
            )
            for each in proposal.rejected
        ),
        predicted=Forecast(
            gain=spread(before) - spread(proposal.after),
            cost_s=sum(each.cost_s for each in forecasts),
            pause_s=sum(each.pause_s for each in forecasts),
            duration_s=sum(each.duration_s for each in forecasts),
        ),
        spread=spread(before),
    )


class History(_Object):
    """The latest plans, the newest last, and what was learnt; kept over a restart."""

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
        return next((plan for plan in self.plans if plan.status is PlanStatus.RUNNING), None)

    def propose(self, plan: Plan) -> History:
        """With a new plan, which replaces those that have not begun.

        Raises:
            Conflict: a plan runs, and what it was made of no longer holds.
        """
        if self.running is not None:
            raise Conflict(f"plan {self.running.id!r} runs; wait until it has ended")
        waiting = PlanStatus.PROPOSED
        before = (
            each.model_copy(update={"status": PlanStatus.REPLACED})
            if each.status is waiting
            else each
            for each in self.plans
        )
        return self.model_copy(update={"plans": (*before, plan)[-self.most :]})

    def start(self, id_: str) -> History:
        """
        Raises:
            NotFound: see :meth:`plan`.
            Conflict: it has begun or ended already.
        """
        plan = self.plan(id_)
        if plan.status is not PlanStatus.PROPOSED:
            raise Conflict(f"plan {id_!r} is {plan.status}; only a proposed plan can be started")
        return self._with(plan.model_copy(update={"status": PlanStatus.RUNNING}))

    def step_done(self, id_: str, real: Forecast) -> History:
        """The running plan's next step was carried out; corrections learn from it.

        Raises:
            NotFound: see :meth:`plan`.
            Conflict: the plan does not run, or has no step left.
        """
        plan, at = self._at_step(id_)
        step = plan.steps[at]
        corrections = self.corrections.learn(
            kind_of(step.action), step.source, step.target, step.raw, real
        )
        steps = _replaced(plan.steps, at, status=StepStatus.DONE, real=real)
        ended = at + 1 == len(steps)
        status = PlanStatus.DONE if ended else PlanStatus.RUNNING
        after = self._with(plan.model_copy(update={"steps": steps, "status": status}))
        return after.model_copy(update={"corrections": corrections})

    def step_failed(self, id_: str, message: str) -> History:
        """The running plan's next step was rolled back; the plan ends with it.

        Raises:
            NotFound, Conflict: as :meth:`step_done`.
        """
        plan, at = self._at_step(id_)
        steps = _replaced(plan.steps, at, status=StepStatus.FAILED, message=message)
        return self._with(_ended(plan.model_copy(update={"steps": steps}), PlanStatus.FAILED))

    def cancel(self, id_: str) -> History:
        """
        Raises:
            NotFound: see :meth:`plan`.
            Conflict: it has ended already.
        """
        plan = self.plan(id_)
        if plan.status not in (PlanStatus.PROPOSED, PlanStatus.RUNNING):
            raise Conflict(f"plan {id_!r} is {plan.status} already")
        return self._with(_ended(plan, PlanStatus.CANCELLED))

    def settled(self, id_: str, snapshot: Snapshot) -> History:
        """What the plan has gained, from a snapshot of after it.

        Raises:
            NotFound: see :meth:`plan`.
        """
        plan = self.plan(id_)
        gain = plan.spread - spread(snapshot)
        return self._with(plan.model_copy(update={"real_gain": gain}))

    def _at_step(self, id_: str) -> tuple[Plan, int]:
        plan = self.plan(id_)
        at = plan.next_step
        if plan.status is not PlanStatus.RUNNING or at is None:
            raise Conflict(f"plan {id_!r} is {plan.status}; none of its steps is under way")
        return plan, at

    def _with(self, plan: Plan) -> History:
        plans = tuple(plan if each.id == plan.id else each for each in self.plans)
        return self.model_copy(update={"plans": plans})


def _replaced(steps: tuple[PlanStep, ...], at: int, **changes: object) -> tuple[PlanStep, ...]:
    return (*steps[:at], steps[at].model_copy(update=changes), *steps[at + 1 :])


def _ended(plan: Plan, status: PlanStatus) -> Plan:
    steps = (
        each.model_copy(update={"status": StepStatus.LEFT})
        if each.status is StepStatus.PENDING
        else each
        for each in plan.steps
    )
    return plan.model_copy(update={"steps": tuple(steps), "status": status})
