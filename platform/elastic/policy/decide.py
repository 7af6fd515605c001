"""Which models come, and which sleep or are unloaded for them or because they are idle.

Demands are met in the order in which they came: what an earlier one waits for, no later one takes.
A model has to have been there for a while before it goes for another, so two never throw each other
out in turn. Models without requests go first. One that always has some gives way to who has waited
for as long, and goes when those that it has have ended; so nobody waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from loomserve.platform.config import Elastic
from loomserve.platform.elastic.policy.snapshot import (
    HOST,
    ElasticDecision,
    ElasticModel,
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


def decide(snapshot: ElasticSnapshot, rules: Elastic) -> ElasticDecision:
    """Decide who comes and goes now."""
    room = _Room(snapshot, rules)
    for demand in snapshot.demands:
        room.meet(demand)
    room.put_idle_away()
    return ElasticDecision(tuple(room.changes), tuple(room.refused), room.waiting_at)


class _Room:
    """Memory of all pools, as demand after demand is met."""

    def __init__(self, snapshot: ElasticSnapshot, rules: Elastic) -> None:
        self.changes: list[PresenceChange] = []
        self.refused: list[NoRoom] = []
        self.waiting_at: dict[str, str] = {}
        self._rules = rules
        self._models = {each.name: each for each in snapshot.models}
        self._budgets = snapshot.budgets
        # A model that is asked for, or has to change for another, is nobody's victim.
        self._spoken_for = {demand.model for demand in snapshot.demands}
        self._free = defaultdict(float, snapshot.budgets)
        # What is free once all are what they are to be.
        self._planned = defaultdict(float, snapshot.budgets)
        self._heat = defaultdict[str, float](float)
        self._there: dict[str, tuple[str, str]] = {}
        for model in snapshot.models:
            for device in model.devices:
                self._heat[device] += model.heat if model.held_bytes else 0.0
            for pool in model.pools:
                self._free[pool] -= model.held_in(pool)
                self._planned[pool] -= model.bytes_as(model.presence, pool)

    def meet(self, demand: ModelDemand) -> None:
        model = self._models.get(demand.model)
        if model is None or model.presence is Presence.READY:
            return
        model = self._placed(model, demand.device)
        bounded = self._bounded(model)
        if never := self._why_never(model):
            self._refuse(model, never)
            return
        grows = {
            pool: model.bytes_as(Presence.READY, pool) - model.bytes_as(model.presence, pool)
            for pool in bounded
        }
        more = {
            pool: max(0.0, model.bytes_as(Presence.READY, pool) - model.held_in(pool))
            for pool in bounded
        }
        if missing := self._missing(grows):
            if not self._makes_room(model, missing, demand):
                return
        elif all(more[pool] <= self._free[pool] for pool in bounded):
            self._change(model, Presence.READY, "it is asked for")
        for pool in bounded:
            self._free[pool] -= more[pool]
            self._planned[pool] -= grows[pool]

    def _missing(self, grows: Mapping[str, float]) -> dict[str, float]:
        """What is missing of pools for this, and what room hosts have; empty: nothing is."""
        left = {pool: self._planned[pool] - size for pool, size in grows.items()}
        lacks = {pool: -size for pool, size in left.items() if size < 0}
        if not lacks:
            return {}
        hosts = [pool for pool in self._budgets if pool.endswith(HOST)]
        room = {pool: max(0.0, left.get(pool, self._planned[pool])) for pool in hosts}
        return {**{pool: -size for pool, size in room.items()}, **lacks}

    def _bounded(self, model: ElasticModel) -> list[str]:
        return [pool for pool in model.pools if pool in self._budgets]

    def _why_never(self, model: ElasticModel) -> str:
        """Why there is no room for it whoever else goes, if so."""
        for pool in self._bounded(model):
            pinned = [
                each
                for each in self._models.values()
                if each.pinned and each is not model and pool in each.pools and each.held_in(pool)
            ]
            left = self._budgets[pool] - sum(each.held_in(pool) for each in pinned)
            if (needed := model.bytes_as(Presence.READY, pool)) > left:
                but = "".join(f", less {_mib(one.held_in(pool))} of {one.name}" for one in pinned)
                device = pool.removesuffix(HOST)
                where = f"device {device}" if pool == device else f"the host of device {device}"
                return (
                    f"it needs {_mib(needed)}, and {where} may give models "
                    f"{_mib(self._budgets[pool])}{but}{', which stays' if pinned else ''}"
                )
        return ""

    def _placed(self, model: ElasticModel, device: str | None) -> ElasticModel:
        """On the device where least is lost, if the platform may choose; but where others go for it
        already, there it stays."""
        possible = [
            each for each in model.choices if not self._why_never(replace(model, devices=(each,)))
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
        there = replace(model, devices=(device,))
        grows = {pool: there.bytes_as(Presence.READY, pool) for pool in self._bounded(there)}
        missing = self._missing(grows)
        bounded = device in self._budgets
        return Site(
            device=device,
            heat=min(1.0, self._heat[device]),
            loss=self._loss(missing) if missing else 0.0,
            free=self._planned[device] - model.ready_bytes if bounded else float("inf"),
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
            # Whoever sleeps waits until its host has room, for which others may go first.
            if wait_s <= 0 and (presence is not Presence.ASLEEP or self._takes_host(each)):
                why = f"{model.name} needs its memory"
                self._change(each, presence, why, drains=each.name in busy)
            self._spoken_for.add(each.name)
            for pool in each.pools:
                self._planned[pool] += each.bytes_as(each.presence, pool)
                self._planned[pool] -= each.bytes_as(presence, pool)
        return True

    def _waits(self, model: ElasticModel, wait_s: float, demand: ModelDemand, why: str) -> bool:
        """Whether it may wait for so long; it is refused otherwise."""
        if demand.waited_s + wait_s <= self._rules.wait_timeout_s:
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
                and self._may_sleep(model)
                and self._takes_host(model)
            ):
                self._change(model, Presence.ASLEEP, f"idle for {idle_s:.0f} s")

    def _more_on_hosts(self, model: ElasticModel) -> dict[str, float]:
        """What a model takes of its hosts by its sleep, as far as they have bounds."""
        return {
            pool: model.bytes_as(Presence.ASLEEP, pool) - model.held_in(pool)
            for pool in self._bounded(model)
            if pool.endswith(HOST)
        }

    def _may_sleep(self, model: ElasticModel) -> bool:
        """Whether its hosts have room for that once all are what they are to be."""
        more = self._more_on_hosts(model)
        return all(size <= self._planned[pool] for pool, size in more.items())

    def _takes_host(self, model: ElasticModel) -> bool:
        """Take room of its hosts for a model that sleeps; False: there is none just now."""
        more = self._more_on_hosts(model)
        if any(size > self._free[pool] for pool, size in more.items()):
            return False
        for pool, size in more.items():
            self._free[pool] -= size
        return True

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
