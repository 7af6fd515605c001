"""Carries out how many replicas models have by their load: starts them, and drains and ends them.

A replica that goes is drained first: its requests go on with others, or end. Only when nothing is
open with it there is to be one fewer. If the load rises meanwhile it takes requests again, at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.snapshot import FleetModel
from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.reports import (
    Event,
    EventKind,
    Kept,
    ModelScaling,
    ScalingCount,
    ScalingReport,
)
from loomserve.platform.rebalancing.policy.actions import Action, AddReplica, RemoveReplica
from loomserve.platform.rebalancing.policy.limits import Reason, Refusal
from loomserve.platform.rebalancing.policy.measured import Measured
from loomserve.platform.rebalancing.policy.planner import weigh_start
from loomserve.platform.rebalancing.policy.scaling import (
    ScalingWatch,
    ScalingWish,
    carried_out,
    leaves,
    look,
)
from loomserve.platform.state import Presence

_log = logging.getLogger("ray.serve")

SetReplicas = Callable[[str, int], None]
"""Has a model have so many replicas, later."""
RoomFor = Callable[[str, str], str]
"""Has room for one more replica of a model on a device; why there is none yet, or nothing."""
Weigh = Callable[[AddReplica, float], Refusal | None]
"""Why a start had better wait, of a model whose replicas have been too few for so long."""
Direction = Literal["up", "down", "held"]


@dataclass(frozen=True)
class ScalingChange:
    """What is to be done of a model, once it has been kept.

    Attributes:
        target: Replicas that there are to be; None: as many as before.
        drain: Replicas that are to be drained.
        take_back: Replicas that are drained, and are to take requests again.
    """

    model: str
    direction: Direction
    reason: str
    why: str
    target: int | None = None
    drain: tuple[str, ...] = ()
    take_back: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()

    def events(self, at_s: float) -> list[Event]:
        return [
            Event(at=at_s, kind=EventKind.SCALED, action=action, message=self.why)
            for action in self.actions
        ]


@dataclass
class Scaler:
    """Looks at models, says what is to change, and changes it; times are of the caller's clock.
    ``room_for`` makes room on devices; the options' limits hold for starts as for all actions."""

    fleet: Fleet
    set_replicas: SetReplicas
    room_for: RoomFor
    options: Rebalancing
    _watches: dict[str, ScalingWatch] = field(default_factory=dict)
    _loads: dict[str, ModelScaling] = field(default_factory=dict)
    _held: dict[str, str] = field(default_factory=dict)
    _counts: Counter[tuple[str, Direction, str]] = field(default_factory=Counter)

    @property
    def has_models(self) -> bool:
        """Whether any model's load decides on its replicas."""
        return any(each.scaling is not None for each in self.fleet.registry.models)

    @property
    def report(self) -> ScalingReport:
        counts = tuple(
            ScalingCount(model=model, direction=direction, reason=reason, count=count)
            for (model, direction, reason), count in sorted(self._counts.items())
        )
        return ScalingReport(models=tuple(self._loads.values()), decisions=counts)

    def kept(self, kept: Kept, at_s: float) -> Kept:
        """What is to be kept of changes: loads change with them, and what was too few is known."""
        found = {name: dict(watch.shortages) for name, watch in self._watches.items()}
        shortages = {name: each for name, each in found.items() if each}
        return kept.model_copy(update={"shortages": shortages, "changed_at_s": at_s})

    def look(
        self, measured: Measured, at_s: float, kept: Kept, history: History
    ) -> list[ScalingChange]:
        """What is to change now. ``kept``: the controller's state, of which what an earlier one
        learnt is taken over; in a running plan of ``history`` any replica may have a part."""
        moves = kept.mode == "auto" and not kept.paused
        weigh = partial(weigh_start, measured, history.corrections, self.options, moves)
        self._forget(measured.scaled)
        changes = list[ScalingChange]()
        for model in measured.scaled:
            if self._end_drained(model):
                continue
            learnt = ScalingWatch(shortages=kept.shortages.get(model.name, {}))
            seen = look(self._watches.get(model.name, learnt), model, at_s)
            self._watches[model.name] = seen.watch
            self._loads[model.name] = ModelScaling(
                model=model.name, replicas=model.kept, load=seen.load
            )
            change = self._change(model, seen.wish, weigh, plan_runs=history.running is not None)
            if change is None:
                continue
            changes.append(change)
            more = change.direction == "up"
            self._watches[model.name] = carried_out(seen.watch, model, at_s, more=more)
        return changes

    def carry_out(self, changes: Iterable[ScalingChange]) -> None:
        """Make them, once they have been kept."""
        for change in changes:
            if change.model in self.fleet.registry:
                self._carry_out(change)

    def _carry_out(self, change: ScalingChange) -> None:
        leaving = self.fleet.registry.drains.leaving
        _log.info("model %s is scaled %s: %s", change.model, change.direction, change.why)
        self._count(change.model, change.direction, change.reason, change.why)
        self._held.pop(change.model, None)
        leaving.difference_update(change.take_back)
        leaving.update(change.drain)
        if change.target is not None:
            self.set_replicas(change.model, change.target)

    def _forget(self, models: Sequence[FleetModel]) -> None:
        """Models that are not ready, or have a number that an operator has set, begin again."""
        there = {each.name for each in models}
        registry = self.fleet.registry
        for id_ in registry.drains.leaving.copy():
            replica = registry.find(id_)
            if replica is not None and replica.model.name not in there:
                registry.drains.leaving.discard(id_)
        self._loads = {name: each for name, each in self._loads.items() if name in there}
        for name in self._watches.keys() - there:
            self._watches[name] = ScalingWatch(shortages=self._watches[name].shortages)
        for record in registry.records:
            rules = record.model.scaling
            if rules is None or record.fixed or record.presence is not Presence.UNLOADED:
                continue
            # With the next request as few come as may be.
            record.target_replicas = rules.least

    def _end_drained(self, model: FleetModel) -> bool:
        """End replicas that have nothing open any more; whether there were any."""
        ended = [each.id for each in model.leaving if each.is_drained]
        for id_ in ended:
            self.fleet.registry.drains.has_left(id_)
        if ended:
            self.set_replicas(model.name, model.record.target_replicas - len(ended))
        return bool(ended)

    def _change(
        self, model: FleetModel, wish: ScalingWish | None, weigh: Weigh, *, plan_runs: bool
    ) -> ScalingChange | None:
        if wish is None:
            self._held.pop(model.name, None)
            return None
        if wish.replicas > model.kept:
            return self._more(model, wish, weigh)
        return None if plan_runs else _fewer(model, wish)

    def _more(self, model: FleetModel, wish: ScalingWish, weigh: Weigh) -> ScalingChange | None:
        missing = wish.replicas - model.kept
        back = tuple(each.id for each in model.leaving)[:missing]
        starts = list[Action]()
        for device in _free_devices(model)[: missing - len(back)]:
            add = AddReplica(model=model.name, device=device)
            refusal = weigh(add, wish.short_s) or self._no_room(add)
            if refusal is not None:
                self._hold(model, wish, refusal)
                break
            starts.append(add)
        if not starts and not back:
            return None
        return ScalingChange(
            model=model.name,
            direction="up",
            reason=str(wish.reason),
            why=wish.why,
            target=model.record.target_replicas + len(starts) if starts else None,
            take_back=back,
            actions=tuple(starts),
        )

    def _no_room(self, add: AddReplica) -> Refusal | None:
        why = self.room_for(add.model, add.device)
        return Refusal(Reason.NO_MEMORY, why) if why else None

    def _hold(self, model: FleetModel, wish: ScalingWish, refusal: Refusal) -> None:
        """Say once that more are wanted, and why they are not started yet."""
        why = f"{wish.why}; {refusal.detail}"
        if self._held.get(model.name) != refusal.reason:
            self._held[model.name] = refusal.reason
            self._count(model.name, "held", str(refusal.reason), why)
        self.fleet.registry.record(model.name).scaling = why

    def _count(self, model: str, direction: Direction, reason: str, why: str) -> None:
        self._counts[model, direction, reason] += 1
        self.fleet.registry.record(model).scaling = why


def _fewer(model: FleetModel, wish: ScalingWish) -> ScalingChange | None:
    leaving = leaves(model, wish.replicas)
    if not leaving:
        return None
    return ScalingChange(
        model=model.name,
        direction="down",
        reason=str(wish.reason),
        why=wish.why,
        drain=tuple(each.id for each in leaving),
        actions=tuple(RemoveReplica(engine=each.id) for each in leaving),
    )


def _free_devices(model: FleetModel) -> list[str]:
    """Where more replicas would start, those that are about to have one left out."""
    used = {each.device for each in model.counted}
    free = [name for name in model.record.devices if name not in used]
    return free[max(0, model.record.target_replicas - len(model.counted)) :]
