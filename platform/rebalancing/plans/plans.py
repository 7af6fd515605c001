"""Plans as an operator sees them, with the state of each step and what its actuator remembers.

An actuator's record is saved before its action begins, so that a restarted controller can go on
with the action, or take it back.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.policy.actions import Action
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.planner import Chosen, Proposal, RejectedStep
from loomserve.platform.rebalancing.policy.snapshot import Snapshot
from loomserve.platform.state.lending_options import ShardSpec
from loomserve.platform.state.roles import Role


class ActionRecord(Frozen):
    """What every actuator remembers; each adds what it sets, and what was there before."""

    name: str = Field(description="Unique among all actions: the plan's id and the step's number.")


class RequestsRecord(ActionRecord):
    """A new limit on the KV that a borrower's replica has with a lender."""

    borrower: str
    lender: str = Field(description="The lender's model.")
    limit: int = Field(description="Bytes.")
    limit_before: int | None
    bytes_before: int = Field(description="KV of the borrower that was with the lender.")


class RunningRecord(ActionRecord):
    """Requests that should go on with another replica; the order has the action's name."""

    engine: str
    to: str
    requests: int


class RoleRecord(ActionRecord):
    """A new role of a replica."""

    replica: str
    role: Role
    role_before: Role


class ReplicasRecord(ActionRecord):
    """A new number of a model's replicas."""

    model: str
    replicas: int
    replicas_before: int
    there_before: tuple[str, ...] = Field(description="Replicas that were alive.")
    leaving: str | None = Field(description="The replica that shall end; null: one starts.")


class ShardRecord(ActionRecord):
    """Heads or layers of an engine that a lender should compute; a null shard is home."""

    engine: str
    lender: str = Field(description="The lender's model.")
    device: str
    shard: ShardSpec | None
    shard_before: ShardSpec | None


AnyRecord = (
    ActionRecord | RequestsRecord | RunningRecord | RoleRecord | ReplicasRecord | ShardRecord
)
"""Records differ in their fields, which tell them apart when they are read."""


class PlanStatus(StrEnum):
    PROPOSED = "proposed"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # an action was rolled back; those before it stand, those after it were left
    REPLACED = "replaced"  # by a newer plan, before it began
    ABORTING = "aborting"  # an operator aborted it, and its step is being taken back or measured
    CANCELLED = "cancelled"  # by an operator; steps that were done stand


ACTIVE = frozenset({PlanStatus.RUNNING, PlanStatus.ABORTING})


class StepStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SETTLING = "settling"  # it is done, and what it gained is about to be measured
    DONE = "done"
    FAILED = "failed"  # and was taken back
    ABORTED = "aborted"
    LEFT = "left"


UNDER_WAY = frozenset({StepStatus.RUNNING, StepStatus.SETTLING})


class Origin(StrEnum):
    CONTROLLER = "controller"
    OPERATOR = "operator"


class PlanStep(Chosen):
    status: StepStatus = StepStatus.PENDING
    record: AnyRecord | None = Field(None, description="What its actuator remembers of it.")
    began: float | None = Field(None, description="Unix time, seconds.")
    acted: float | None = Field(None, description="Unix time, seconds, when it was carried out.")
    loads_before: dict[str, float] | None = Field(None, description="Utilisation by device.")
    loads_after: dict[str, float] | None = None
    moved_bytes: int = 0
    paused_s: float = 0.0
    real: Forecast | None = Field(None, description="Measured gain and cost, once it is done.")
    message: str = Field("", description="Why it failed, for a person.")


class Plan(Frozen):
    id: str
    created: float = Field(description="Unix time, seconds.")
    ended: float | None = Field(None, description="Unix time, seconds.")
    origin: Origin = Origin.CONTROLLER
    forced: bool = Field(False, description="True: its steps may exceed the limits.")
    status: PlanStatus = PlanStatus.PROPOSED
    steps: tuple[PlanStep, ...]
    rejected: tuple[RejectedStep, ...]
    predicted: Forecast = Field(
        description="Forecast of all steps; its gain is by how much the spread becomes less."
    )
    spread: float = Field(
        description="Utilisation of the most over that of the least loaded device, as it was made."
    )
    real_gain: float | None = Field(
        None, description="By how much the spread became less, measured after the last step."
    )

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(step.action for step in self.steps)

    @property
    def next_step(self) -> int | None:
        """The number of the step that is under way or next; None: there is none."""
        if self.status not in ACTIVE | {PlanStatus.PROPOSED}:
            return None
        open_ = UNDER_WAY | {StepStatus.PENDING}
        return next((at for at, step in enumerate(self.steps) if step.status in open_), None)


def spread(snapshot: Snapshot) -> float:
    """The most loaded device's utilisation less that of the least loaded."""
    loads = snapshot.loads.values()
    return max(loads) - min(loads)


def plan_of(
    id_: str,
    created: float,
    before: Snapshot,
    proposal: Proposal,
    origin: Origin = Origin.CONTROLLER,
    *,
    forced: bool = False,
) -> Plan | None:
    """The plan of a proposal; None: the proposal does nothing."""
    if not proposal.chosen:
        return None
    forecasts = [each.predicted for each in proposal.chosen]
    return Plan(
        id=id_,
        created=created,
        origin=origin,
        forced=forced,
        steps=tuple(PlanStep(**dict(each)) for each in proposal.chosen),
        rejected=proposal.rejected,
        predicted=Forecast(
            gain=spread(before) - spread(proposal.after),
            cost_s=sum(each.cost_s for each in forecasts),
            pause_s=sum(each.pause_s for each in forecasts),
            duration_s=sum(each.duration_s for each in forecasts),
        ),
        spread=spread(before),
    )


def alike(one: Plan, other: Plan) -> bool:
    """Whether both take the same actions, perhaps with other amounts."""

    def done(plan: Plan) -> list[dict[str, object]]:
        return [step.action.model_dump(exclude={"amount"}) for step in plan.steps]

    return done(one) == done(other)
