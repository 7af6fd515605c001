"""States and events that the rebalancing controller shows, and the state that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict, Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.plans.plans import Origin, Plan, PlanStatus
from loomserve.platform.rebalancing.policy.actions import Action
from loomserve.platform.rebalancing.policy.forecast import Forecast
from loomserve.platform.rebalancing.policy.heat import Heat, Level
from loomserve.platform.rebalancing.policy.measured import Flaw, Measured
from loomserve.platform.rebalancing.policy.planner import RejectedStep
from loomserve.platform.rebalancing.policy.scaling import Shortage
from loomserve.platform.rebalancing.policy.snapshot import compute_share, memory_share

Mode = Literal["off", "advise", "auto"]


class Kept(Frozen):
    """State beside the plans that a controller needs after a restart."""

    mode: Mode
    configured: Mode = Field(
        description="Mode of the configuration at that time; a new one there counts."
    )
    paused: bool = False
    heat: dict[str, Heat] = Field(default_factory=dict)
    changed_at_s: float = Field(0.0, description="Unix time, seconds, when the last action ended.")
    shortages: dict[str, dict[int, Shortage]] = Field(
        default_factory=dict,
        description="By model and number of replicas, the load for which these were too few.",
    )


class EventKind(StrEnum):
    PROPOSED = "proposed"
    STARTED = "started"
    BEGUN = "begun"  # one action
    DONE = "done"  # one action, measured
    FAILED = "failed"  # one action
    ABORTED = "aborted"
    SWITCHED = "switched"  # the mode, or the pause
    SCALED = "scaled"  # a model has more or fewer replicas, by its load


class Event(Frozen):
    at: float = Field(description="Unix time, seconds.")
    kind: EventKind
    plan: str | None = None
    step: int | None = Field(None, description="Number of the plan's step, from 0.")
    action: Action | None = None
    loads_before: dict[str, float] | None = Field(None, description="Utilisation by device.")
    loads_after: dict[str, float] | None = None
    message: str = ""


class DeviceLoad(Frozen):
    device: str
    compute: float = Field(description="Device seconds a second that are asked for.")
    memory: float = Field(description="Share in use; KV memory that nobody uses is not.")
    level: Level = Field(description="Level that the controller has confirmed.")

    @property
    def utilisation(self) -> float:
        return self.compute + self.memory


class ActionCount(Frozen):
    kind: str
    outcome: str
    count: int


class ScalingCount(Frozen):
    model: str
    direction: Literal["up", "down", "held"] = Field(
        description="held: more were wanted, and could not be started just then."
    )
    reason: str
    count: int


class ModelScaling(Frozen):
    """A model whose load decides on its replicas, as it was looked at last."""

    model: str
    replicas: int = Field(description="That there should be.")
    load: float = Field(description="In replicas.")


class ScalingReport(Frozen):
    """What load decides of models' replicas."""

    models: tuple[ModelScaling, ...] = Field(
        (), description="Models that are ready, and whose load decides on their replicas."
    )
    decisions: tuple[ScalingCount, ...] = Field(
        (), description="Decisions since this controller started."
    )


class RebalancingState(Frozen):
    """Behind ``GET /admin/v1/rebalancing`` and ``loomserve admin plans``."""

    mode: Mode
    paused: bool
    problem: str | None = Field(description="Why the controller does not act; null: it may.")
    devices: tuple[DeviceLoad, ...] = Field(description="Empty while something is missing.")
    flaws: tuple[Flaw, ...] = Field(description="Why no plan can be made just now.")
    running: str | None = Field(description="The plan that is carried out.")
    actions: tuple[ActionCount, ...] = Field(
        (), description="Actions that ended since this controller started."
    )
    rejected: dict[str, int] = Field(
        default_factory=dict,
        description="Candidates not chosen, by reason, since this controller started.",
    )
    moved_bytes: dict[str, int] = Field(
        default_factory=dict, description="Bytes moved, by kind, since then."
    )
    paused_s: float = Field(
        0.0, description="Seconds that engines stood still for actions, since then."
    )
    scaling: ScalingReport | None = Field(None, description="None: nobody scales models.")


class PlanSummary(Frozen):
    model_config = ConfigDict(from_attributes=True)

    id: str
    created: float
    ended: float | None
    origin: Origin
    status: PlanStatus
    actions: tuple[Action, ...]
    predicted: Forecast
    spread: float
    real_gain: float | None


class PlanList(Frozen):
    plans: tuple[PlanSummary, ...] = Field(description="The newest first.")


class MadePlan(Frozen):
    """The answer to a request for a plan."""

    plan: Plan | None = Field(None, description="Null: nothing would be moved.")
    flaws: tuple[Flaw, ...] = Field((), description="Why nothing could even be considered.")
    rejected: tuple[RejectedStep, ...] = Field((), description="Candidates that were not chosen.")
    rejected_by_reason: dict[str, int] = Field(default_factory=dict)


class Events(Frozen):
    events: tuple[Event, ...] = Field(description="The newest first.")


def device_loads(measured: Measured, heat: Mapping[str, Heat]) -> tuple[DeviceLoad, ...]:
    """Loads of all devices; empty where something could not be measured."""
    snapshot = measured.snapshot
    if snapshot is None:
        return ()
    return tuple(
        DeviceLoad(
            device=device.name,
            compute=compute_share(snapshot, device.name),
            memory=memory_share(snapshot, device.name),
            level=heat.get(device.name, Heat()).level,
        )
        for device in snapshot.devices
    )
