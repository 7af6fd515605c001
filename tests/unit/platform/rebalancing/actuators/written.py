"""Actuators that write down what they are told, over a fleet that is only numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from loomserve.platform.base.errors import Conflict
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Progress
from loomserve.platform.rebalancing.plans.plans import ActionRecord
from loomserve.platform.rebalancing.policy.actions import Action
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.measured import Measured
from loomserve.platform.rebalancing.policy.snapshot import Snapshot
from tests.unit.platform.rebalancing.fleets import measured_at


@dataclass
class Platform:
    """The fleet and its clock; what is carried out has the predicted effect."""

    snapshot: Snapshot
    now_s: float = 1000.0
    age_s: float = 0.0
    """Of all measurements."""

    def clock(self) -> float:
        return self.now_s

    def observe(self, changed_at_s: float) -> Measured:
        seen = measured_at(self.snapshot, self.now_s - self.age_s)
        return Measured(replace(seen, at_s=self.now_s, changed_at_s=changed_at_s), ())


@dataclass
class WrittenActuator:
    """Shared by the controllers of a test, as what is moved outlives a controller."""

    platform: Platform
    told: list[str] = field(default_factory=list)
    outcome: ActionOutcome = ActionOutcome.DONE
    refuses: str | None = None
    breaks: bool = False
    too_late: bool = False
    """For an abort."""
    _aborted: bool = False
    _actions: dict[str, Action] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def prepare(self, name: str, action: Action) -> ActionRecord:
        if self.refuses:
            raise Conflict(self.refuses)
        self._actions[name] = action
        return ActionRecord(name=name)

    async def begin(self, record: ActionRecord) -> None:
        self.told.append(f"begin {self._actions[record.name].action}")
        if self.breaks:
            raise RuntimeError("the engine is gone")

    async def abort(self, record: ActionRecord) -> None:
        self.told.append("abort")
        self._aborted = not self.too_late

    async def progress(self, record: ActionRecord) -> Progress:
        if self._aborted:
            return Progress(outcome=ActionOutcome.ABORTED, message="taken back")
        if self.outcome is ActionOutcome.DONE and record.name not in self._done:
            self._done.add(record.name)
            self.platform.snapshot = apply(self.platform.snapshot, self._actions[record.name])
        return Progress(outcome=self.outcome, moved_bytes=7, paused_s=0.25, message="as told")
