"""Chooses actions that even out the devices' loads: BanaServe's adaptive module migration (4-1).

docs/rebalancing.md says where this departs from the paper, and why. The cheapest action that passes
comes first, and the loop goes on with what is left of the gap, on the loads predicted after each
action. An action must lower the sum of squared utilisations by (least gain)²/4 at least, as any
does that narrows a gap so far between devices of one speed and leaves the others alone, and raise
no maximum (section 4.3.2); so on a steady load plans come to an end, and lead nowhere twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop
from operator import mul

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
    kind_of,
)
from loomserve.platform.rebalancing.policy.candidates import candidates, reachable
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Corrections, Forecast, forecast
from loomserve.platform.rebalancing.policy.heat import Heat, Level, at_once
from loomserve.platform.rebalancing.policy.limits import (
    Reason,
    Refusal,
    engines_of,
    exceeded,
    over_budget,
    unable,
)
from loomserve.platform.rebalancing.policy.measured import Flaw, Measured, flaws
from loomserve.platform.rebalancing.policy.snapshot import Snapshot, compute_share

_ROUNDING = 1e-9

LISTED_PAIRS = 1024
"""Of so many pairs of a hot and a cold device, all are looked at, and each refusal is listed.

Of more, pairs between which nothing can pass are left out, and the search ends with the last action
that a plan may have: the plan is the same, and nobody reads a million refusals. The two limits
below hold then, too; docs/rebalancing.md says what they lose.
"""
MOST_TARGETS = 4
"""A hot device is passed over for one action once something failed with so many targets."""
MOST_WORK = 4_000
"""Devices whose figures are computed again for one action, over all candidates."""


class Chosen(Frozen):
    action: Action
    source: str = Field(description="The hot device from which it takes work.")
    target: str = Field(description="The cold device to which it brings work.")
    raw: Forecast = Field(description="The forecast from measurements alone.")
    predicted: Forecast = Field(
        description="The forecast corrected by earlier actions of its kind."
    )


class RejectedStep(Frozen):
    action: Action
    source: str
    target: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """Actions to be carried out one after the other, and the snapshot after them; the last refusal
    of each other candidate. With flaws of the snapshot, nothing was even considered."""

    chosen: tuple[Chosen, ...]
    rejected: tuple[RejectedStep, ...]
    flaws: tuple[Flaw, ...]
    after: Snapshot


def foreseen(
    now: Snapshot, after: Snapshot, action: Action, source: str, target: str, learnt: Corrections
) -> Chosen:
    """The action with its forecasts."""
    raw = forecast(now, after, action, source, target)
    predicted = learnt.of(kind_of(action), source, target)(raw)
    return Chosen(action=action, source=source, target=target, raw=raw, predicted=predicted)


def propose(
    snapshot: Snapshot, heat: Mapping[str, Heat], corrections: Corrections, options: Rebalancing
) -> Proposal:
    """A plan for one period; ``heat`` is :func:`.heat.classify`'s of this snapshot."""
    found = tuple(flaws(snapshot, options))
    if found:
        return Proposal((), (), found, snapshot)
    search = _Search(snapshot, heat, corrections, options)
    search.run()
    return Proposal(tuple(search.chosen), tuple(search.rejected.values()), (), search.now)


def weigh_start(
    measured: Measured,
    corrections: Corrections,
    options: Rebalancing,
    moves: bool,
    add: AddReplica,
    short_s: float,
) -> Refusal | None:
    """Why one more replica is not to be started, although its model's load asks for it. Lending
    takes milliseconds, moving requests seconds, a start tens of them. So the same search as for any
    plan says first whether what moves would do, for as long as a start would have taken. Where
    nothing fit to decide on was measured, nothing speaks against it. ``moves``: whether plans are
    carried out; ``short_s``: for how long the model's replicas have been too few."""
    snapshot = measured.snapshot
    if snapshot is None or measured.flaws(options):
        return None
    model = snapshot.model(add.model)
    if model.replica is None:
        return None
    after = apply(snapshot, add)
    refusal = exceeded(snapshot, snapshot, after, options)
    if refusal is not None and refusal.reason is Reason.NO_MEMORY:
        return refusal
    hottest = max(snapshot.of(add.model), key=lambda each: snapshot.loads[each.device])
    start = foreseen(snapshot, after, add, hottest.device, add.device, corrections).predicted
    if not moves or short_s >= start.cost_s:
        return None
    plan = propose(snapshot, at_once(snapshot.loads, options), corrections, options)
    easing = [each for each in plan.chosen if _takes_from(snapshot, each.action, add.model)]
    took_s = sum(each.predicted.duration_s for each in easing)
    carried = all(compute_share(plan.after, each.device) <= 1 for each in plan.after.of(add.model))
    if easing and carried and took_s < start.cost_s:
        kinds = ", ".join(sorted({str(kind_of(each.action)) for each in easing}))
        said = f"to move {kinds} takes {took_s:.1f} s, and a start {start.cost_s:.1f} s"
        return Refusal(Reason.CHEAPER, said)
    return None


def _takes_from(snapshot: Snapshot, action: Action, model: str) -> bool:
    match action:
        case Move(back=False) | MoveRequests():
            return snapshot.engine(action.engine).model == model
        case _:
            return False


class _Search:
    def __init__(
        self,
        start: Snapshot,
        heat: Mapping[str, Heat],
        corrections: Corrections,
        options: Rebalancing,
    ) -> None:
        self._start = start
        self._corrections, self._options = corrections, options
        self.now = start
        self._hot, self._cold = (
            [
                device.name
                for device in start.devices
                if heat.get(device.name, Heat()).level is level
            ]
            for level in (Level.HOT, Level.COLD)
        )
        self._lists_all = len(self._hot) * len(self._cold) <= LISTED_PAIRS
        self._failed: Counter[str] = Counter()
        self._work = 0
        self._touched: set[tuple[str, ...]] = set()
        self._identities: set[tuple[object, ...]] = set()
        self.chosen: list[Chosen] = []
        self.rejected: dict[tuple[object, ...], RejectedStep] = {}

    def run(self) -> None:
        while any(self._improve(*pair) for pair in self._pairs() if self._is_worth(pair[0])):
            self._failed.clear()
            self._work = 0

    def _is_worth(self, source: str) -> bool:
        """Whether to look at one more pair, with this hot device."""
        return self._lists_all or (
            len(self.chosen) < self._options.most_actions
            and self._failed[source] < MOST_TARGETS
            and self._work < MOST_WORK
        )

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Hot and cold devices whose gap is to be narrowed, the widest first (lines 4 to 7)."""
        loads = self.now.loads
        least, most = min(loads.values()), max(loads.values())
        falling = self._options.falling
        hot = [name for name in self._hot if loads[name] - least > falling]
        cold = [name for name in self._cold if most - loads[name] > falling]
        targets = dict.fromkeys(hot, cold) if self._lists_all else reachable(self.now, hot, cold)
        pairs = [
            (loads[target] - loads[source], source, target)
            for source in hot
            for target in targets[source]
            if loads[source] - loads[target] > falling
        ]
        # Mostly the first few are looked at.
        heapify(pairs)
        while pairs:
            _, source, target = heappop(pairs)
            yield source, target

    def _improve(self, source: str, target: str) -> bool:
        """Take the cheapest action that passes, if any does (lines 8 to 14)."""
        passed: list[tuple[float, float, int, Chosen, Snapshot]] = []
        all_ = candidates(
            self._start, self.now, source, target, self._options, all_moves=self._lists_all
        )
        work = self._work
        for place, action in enumerate(all_):
            assessed = self._assess(action, source, target)
            if isinstance(assessed, Refusal):
                self._reject(action, source, target, assessed)
            else:
                chosen, after = assessed
                predicted = chosen.predicted
                passed.append((predicted.cost_s, -predicted.gain, place, chosen, after))
        if not passed:
            self._failed[source] += self._work > work
            return False
        *_, cheapest, after = min(passed, key=lambda each: each[:3])
        self._touched.add(_touches(self.now, cheapest.action))
        self._identities.add(_identity(cheapest.action))
        self.now = after
        self.chosen.append(cheapest)
        self.rejected.pop(_identity(cheapest.action), None)
        return True

    def _reject(self, action: Action, source: str, target: str, refusal: Refusal) -> None:
        identity = _identity(action)
        if identity not in self._identities:
            self.rejected[identity] = RejectedStep(
                action=action,
                source=source,
                target=target,
                reason=refusal.reason,
                detail=refusal.detail,
            )

    def _assess(
        self, action: Action, source: str, target: str
    ) -> tuple[Chosen, Snapshot] | Refusal:
        refusal = self._before(action)
        if refusal is not None:
            return refusal
        after = apply(self.now, action)
        self._work += len(after.touched_since(self.now) or after.devices)
        found = foreseen(self.now, after, action, source, target, self._corrections)
        refusal = (
            exceeded(self._start, self.now, after, self._options)
            or over_budget(self._earlier(), action, found.predicted, self._options)
            or self._useless(found.predicted, after)
        )
        return refusal or (found, after)

    def _before(self, action: Action) -> Refusal | None:
        started = all(self._start.has(engine) for engine in engines_of(action))
        if _touches(self.now, action) in self._touched or not started:
            return Refusal(Reason.ALREADY_PLANNED, "an action before it changes the same")
        if len(self.chosen) >= self._options.most_actions:
            return Refusal(Reason.PLAN_FULL, f"{len(self.chosen)} actions already")
        return unable(self.now, action, self._options)

    def _earlier(self) -> list[tuple[Action, Forecast]]:
        return [(each.action, each.predicted) for each in self.chosen]

    def _useless(self, predicted: Forecast, after: Snapshot) -> Refusal | None:
        if predicted.gain < self._options.least_gain:
            return Refusal(Reason.NO_GAIN, f"{predicted.gain:.3f}")
        loads, later = self.now.loads, after.loads
        fallen = _squares(loads) - _squares(later)
        if (
            max(later.values()) > max(loads.values()) + _ROUNDING
            or fallen < self._options.least_gain**2 / 4
        ):
            return Refusal(Reason.HARMS_OTHERS, "it moves load rather than evens it out")
        if predicted.gain < self._options.efficiency * predicted.cost_s:
            return Refusal(Reason.INEFFICIENT, f"{predicted.gain / predicted.cost_s:.4f} a second")
        return None


def _squares(loads: Mapping[str, float]) -> float:
    return sum(map(mul, loads.values(), loads.values()), 0.0)


def _touches(snapshot: Snapshot, action: Action) -> tuple[str, ...]:
    """What must not be changed twice by one plan."""
    match action:
        case Move():
            return ("move", action.kind, action.engine, action.lender)
        case MoveRequests():
            return ("requests", action.engine, action.to)
        case AddReplica():
            return ("model", action.model)
        case SetRole() | RemoveReplica():
            return ("model", snapshot.engine(action.engine).model)


def _identity(action: Action) -> tuple[object, ...]:
    """What tells one candidate from another, whatever its amount."""
    return tuple(value for field, value in action if field not in ("amount", "requests"))
