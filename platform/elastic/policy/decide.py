"""Which models come, and which sleep or are unloaded for them or because they are idle.

Demands are met in the order in which they came: what an earlier one waits for, no later one takes.
A model has to have been there for a while before it goes for another, so two never throw each other
out in turn. Models without requests go first. One that always has some gives way to who has waited
for as long, and goes when those that it has have ended; so nobody waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loomserve.platform.elastic.policy.snapshot import (
    ElasticDecision,
    ElasticModel,
    ElasticRules,
    ElasticSnapshot,
    ModelDemand,
    NoRoom,
    PresenceChange,
)
from loomserve.platform.elastic.policy.victims import chosen_victims, loss_of
from loomserve.platform.placement.policy.sites import Site, best_site, why_there
from loomserve.platform.state import Presence

# Of others to go before they should, and while they have requests.
_LATER = 10.0


def decide(snapshot: ElasticSnapshot, rules: ElasticRules) -> ElasticDecision:
    """Decide who comes and goes now."""
    room = _Room(snapshot, rules)
    for demand in snapshot.demands:
        room.meet(demand)
    room.put_idle_away()
    return ElasticDecision(tuple(room.changes), tuple(room.refused), room.waiting_at)


class _Room:
    """Memory of all devices, as demand after demand is met."""

    def __init__(self, snapshot: ElasticSnapshot, rules: ElasticRules) -> None:
        self.changes: list[PresenceChange] = []
        self.refused: list[NoRoom] = []
        self.waiting_at: dict[str, str] = {}
        self._rules = rules
        self._models = {each.name: each for each in snapshot.models}
        self._budgets = snapshot.budgets
        # Whoever is asked for, or has to change for another, is nobody's victim.
        self._spoken_for = {demand.model for demand in snapshot.demands}
        self._free = defaultdict(float, snapshot.budgets)
        # What is free once all are what they are to be.
        self._planned = defaultdict(float, snapshot.budgets)
        self._heat = defaultdict[str, float](float)
        self._there: dict[str, tuple[str, str]] = {}
        for model in snapshot.models:
            for device in model.devices:
                self._heat[device] += model.heat if model.held_bytes else 0.0
                self._free[device] -= model.held_bytes
                self._planned[device] -= model.bytes_as(model.presence)

    def meet(self, demand: ModelDemand) -> None:
        model = self._models.get(demand.model)
        if model is None or model.presence is Presence.READY:
            return
        model = self._placed(model, demand.device)
        bounded = [device for device in model.devices if device in self._budgets]
        if never := self._why_never(model, bounded):
            self._refuse(model, never)
            return
        grows = model.ready_bytes - model.bytes_as(model.presence)
        missing = {
            device: grows - self._planned[device]
            for device in bounded
            if self._planned[device] < grows
        }
        more = max(0.0, model.ready_bytes - model.held_bytes)
        if missing:
            if not self._makes_room(model, missing, demand):
                return
        elif all(more <= self._free[device] for device in bounded):
            self._change(model, Presence.READY, "it is asked for")
        for device in bounded:
            self._free[device] -= more
            self._planned[device] -= grows

    def _why_never(self, model: ElasticModel, devices: Sequence[str]) -> str:
        """Why there is no room for it whoever else goes, if so."""
        for device in devices:
            pinned = [
                each
                for each in self._models.values()
                if each.pinned and each is not model and device in each.devices and each.held_bytes
            ]
            left = self._budgets[device] - sum(each.held_bytes for each in pinned)
            if model.ready_bytes > left:
                but = "".join(f", less {_mib(one.held_bytes)} of {one.name}" for one in pinned)
                return (
                    f"it needs {_mib(model.ready_bytes)}, and device {device} may give models "
                    f"{_mib(self._budgets[device])}{but}{', which stays' if pinned else ''}"
                )
        return ""

    def _placed(self, model: ElasticModel, device: str | None) -> ElasticModel:
        """On the device where least is lost, if the platform may choose; but where others go for it
        already, there it stays."""
        possible = [
            each
            for each in model.choices
            if each not in self._budgets or not self._why_never(model, [each])
        ]
        if not possible:
            return model
        sites = [self._site(model, device) for device in possible]
        begun = [each for each in sites if each.device == device and _may_go_now(each)]
        best = begun[0] if begun else best_site(sites)
        self.waiting_at[model.name] = best.device
        self._there[model.name] = best.device, why_there(best, sites)
        return replace(model, devices=(best.device,))

    def _site(self, model: ElasticModel, device: str) -> Site:
        free = float("inf")
        if device in self._budgets:
            free = self._planned[device] - model.ready_bytes
        return Site(
            device=device,
            heat=min(1.0, self._heat[device]),
            loss=0.0 if free >= 0 else self._loss({device: -free}),
            free=free,
        )

    def _loss(self, missing: Mapping[str, float]) -> float | None:
        """Of the models that would go, as :meth:`_makes_room` has them."""
        for turn, candidates in enumerate(self._may_go_in_turn()):
            victims = chosen_victims(candidates, missing)
            if victims is not None:
                return turn * _LATER + loss_of(candidates, victims)
        return None

    def _may_go_in_turn(self) -> Iterator[list[ElasticModel]]:
        """Models that could go: without requests, also those that came lately, and all."""
        idle = [each for each in self._settled() if each.idle_s > 0]
        busy = [each for each in self._settled() if not each.idle_s]
        yield [each for each in idle if not self._stays_s(each)]
        yield idle
        yield idle + busy

    def _makes_room(
        self, model: ElasticModel, missing: Mapping[str, float], demand: ModelDemand
    ) -> bool:
        """Have others go, or wait until some may; False: it is refused."""
        for candidates in self._may_go_in_turn():
            victims = chosen_victims(candidates, missing)
            if victims is not None:
                return self._have_go(model, victims, demand)
        # Whoever is on the way goes again, when it has been there for a while.
        return self._waits(model, self._rules.residence_s, demand, "others come before it")

    def _have_go(
        self, model: ElasticModel, victims: Mapping[str, Presence], demand: ModelDemand
    ) -> bool:
        """Have these go, or wait until all may; False: the demand cannot wait for so long."""
        going = [self._models[name] for name in victims]
        busy = {each.name for each in going if not each.idle_s}
        wait_s = max(self._stays_s(each) for each in going)
        if busy:
            wait_s = max(wait_s, self._rules.residence_s - demand.waited_s)
        names = ", ".join(sorted(victims))
        if wait_s > 0 and not self._waits(
            model, wait_s, demand, f"{names} may stay for {wait_s:.0f} s more"
        ):
            return False
        for each in going:
            presence = victims[each.name]
            if wait_s <= 0:
                why = f"{model.name} needs its memory"
                self._change(each, presence, why, drains=each.name in busy)
            self._spoken_for.add(each.name)
            for device in each.devices:
                self._planned[device] += each.bytes_as(each.presence) - each.bytes_as(presence)
        return True

    def _waits(self, model: ElasticModel, wait_s: float, demand: ModelDemand, why: str) -> bool:
        """Whether it may wait for so long; it is refused otherwise."""
        if demand.waited_s + wait_s <= self._rules.patience_s:
            return True
        self._refuse(model, why, wait_s)
        return False

    def put_idle_away(self) -> None:
        """Have models sleep or end that had no request for as long as their rules say."""
        for model in self._settled():
            if not model.idle_s:
                continue
            idle_s = min(model.idle_s, model.since_s)
            if model.presence is Presence.ASLEEP:
                idle_s = model.idle_s
            if model.unload_after_s is not None and idle_s >= model.unload_after_s:
                self._change(model, Presence.UNLOADED, f"idle for {idle_s:.0f} s")
            elif (
                model.presence is Presence.READY
                and model.can_sleep
                and model.sleep_after_s is not None
                and idle_s >= model.sleep_after_s
            ):
                self._change(model, Presence.ASLEEP, f"idle for {idle_s:.0f} s")

    def _settled(self) -> list[ElasticModel]:
        """Models that could go, but perhaps for their requests or for having come a moment ago."""
        return [
            each
            for each in self._models.values()
            if each.may_go and each.name not in self._spoken_for
        ]

    def _stays_s(self, model: ElasticModel) -> float:
        """For how long it may stay still, having come a moment ago."""
        if model.presence is Presence.ASLEEP:
            return 0.0
        return max(0.0, self._rules.residence_s - model.since_s)

    def _change(
        self, model: ElasticModel, presence: Presence, why: str, *, drains: bool = False
    ) -> None:
        device, reason = None, ""
        if presence is Presence.READY:
            device, reason = self._there.get(model.name, (None, ""))
        self.changes.append(PresenceChange(model.name, presence, why, drains, device, reason))

    def _refuse(self, model: ElasticModel, why: str, retry_after_s: float = 60.0) -> None:
        self.refused.append(NoRoom(model.name, why, retry_after_s))


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def _may_go_now(site: Site) -> bool:
    """Whether there is room, or those that would go need not stay."""
    return site.loss is not None and site.loss < _LATER
