"""Which models come, and which sleep or are unloaded for them or because they are idle.

Demands are met in the order in which they came: what an earlier one waits for, no later one takes.
A model has to have been there for a while before it goes for another, so two never throw each other
out in turn; and only one without requests goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from loomserve.platform.elastic.policy.snapshot import (
    ElasticDecision,
    ElasticModel,
    ElasticRules,
    ElasticSnapshot,
    ModelDemand,
    NoRoom,
    PresenceChange,
)
from loomserve.platform.elastic.policy.victims import chosen_victims
from loomserve.platform.state import Presence

# What changes by itself within seconds: a request that runs ends, say.
_SOON_S = 5.0


def decide(snapshot: ElasticSnapshot, rules: ElasticRules) -> ElasticDecision:
    """Decide who comes and goes now."""
    room = _Room(snapshot, rules)
    for demand in snapshot.demands:
        room.meet(demand)
    room.put_idle_away()
    return ElasticDecision(tuple(room.changes), tuple(room.refused))


class _Room:
    """Memory of all devices, as demand after demand is met."""

    def __init__(self, snapshot: ElasticSnapshot, rules: ElasticRules) -> None:
        self.changes: list[PresenceChange] = []
        self.refused: list[NoRoom] = []
        self._rules = rules
        self._models = {each.name: each for each in snapshot.models}
        self._budgets = snapshot.budgets
        # Whoever is asked for, or has to change for another, is nobody's victim.
        self._spoken_for = {demand.model for demand in snapshot.demands}
        self._free = defaultdict(float, snapshot.budgets)
        self._coming = defaultdict[str, float](float)
        for model in snapshot.models:
            for device in model.devices:
                self._free[device] -= model.held_bytes
                later = max(0.0, model.held_bytes - model.bytes_as(model.presence))
                self._coming[device] += later

    def meet(self, demand: ModelDemand) -> None:
        model = self._models.get(demand.model)
        if model is None or model.presence is Presence.READY:
            return
        more = max(0.0, model.ready_bytes - model.held_bytes)
        bounded = [device for device in model.devices if device in self._budgets]
        if too_small := [each for each in bounded if model.ready_bytes > self._budgets[each]]:
            self._refuse(model, _too_large(model, too_small[0], self._budgets))
            return
        missing = {
            device: more - self._free[device] for device in bounded if self._free[device] < more
        }
        if not missing:
            self._change(model, Presence.READY, "it is asked for")
        elif not self._makes_room(model, missing, demand):
            return
        for device in bounded:
            self._free[device] -= more

    def _makes_room(
        self, model: ElasticModel, missing: Mapping[str, float], demand: ModelDemand
    ) -> bool:
        """Have others go, or wait for some that go; False: it is refused."""
        missing = {
            device: size - self._coming[device]
            for device, size in missing.items()
            if size > self._coming[device]
        }
        victims = chosen_victims([each for each in self._idle() if self._may_go(each)], missing)
        if victims is not None:
            self._promise(victims)
            for name, presence in victims.items():
                self._change(self._models[name], presence, f"{model.name} needs its memory")
            return True
        later = chosen_victims(list(self._idle()), missing)
        if later is None:
            self._refuse(model, self._no_victims(model, missing), _SOON_S)
            return False
        wait_s = max(self._rules.residence_s - self._models[name].since_s for name in later)
        if demand.waited_s + wait_s > self._rules.patience_s:
            names = ", ".join(sorted(later))
            why = f"{names} came a moment ago, and stays for {wait_s:.0f} s more"
            self._refuse(model, why, wait_s)
            return False
        self._promise(later)
        return True

    def _promise(self, victims: Mapping[str, Presence]) -> None:
        """What these free is for who was just looked at, and they are no one else's victims."""
        for name, presence in victims.items():
            model = self._models[name]
            self._spoken_for.add(name)
            for device in model.devices:
                self._coming[device] += model.held_bytes - model.bytes_as(presence)

    def put_idle_away(self) -> None:
        """Have models sleep or end that had no request for as long as their rules say."""
        for model in self._idle():
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

    def _idle(self) -> list[ElasticModel]:
        """Models that could go, but perhaps for having come a moment ago."""
        return [
            each
            for each in self._models.values()
            if each.settled
            and each.idle_s > 0
            and not each.pinned
            and each.presence is not Presence.UNLOADED
            and each.name not in self._spoken_for
        ]

    def _may_go(self, model: ElasticModel) -> bool:
        return model.presence is Presence.ASLEEP or model.since_s >= self._rules.residence_s

    def _no_victims(self, model: ElasticModel, missing: Mapping[str, float]) -> str:
        there = [
            each.name
            for each in self._models.values()
            if each.held_bytes and each is not model and set(each.devices) & missing.keys()
        ]
        return (
            f"it needs {_mib(model.ready_bytes)} on {', '.join(sorted(missing))}, and "
            f"{', '.join(sorted(there))} have requests, are asked for or are pinned"
        )

    def _change(self, model: ElasticModel, presence: Presence, why: str) -> None:
        self.changes.append(PresenceChange(model.name, presence, why))

    def _refuse(self, model: ElasticModel, why: str, retry_after_s: float = 60.0) -> None:
        self.refused.append(NoRoom(model.name, why, retry_after_s))


def _too_large(model: ElasticModel, device: str, budgets: Mapping[str, float]) -> str:
    return (
        f"it needs {_mib(model.ready_bytes)}, and device {device} may give models "
        f"{_mib(budgets[device])}"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
