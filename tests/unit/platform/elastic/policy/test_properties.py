"""What holds whatever is asked for: simulated fleets under random requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.elastic.policy.decide import decide
from loomserve.platform.elastic.policy.snapshot import (
    HOST,
    ElasticDecision,
    ElasticModel,
    ElasticSnapshot,
    ModelDemand,
)
from loomserve.platform.state import Presence
from tests.unit.platform.elastic.policy.models import RULES

_TICK_S = 1.0
_WAKE_TICKS, _LOAD_TICKS, _GO_TICKS = 1, 4, 2
# What an engine on a GPU takes of its host.
_ENGINE = 0.25


@dataclass
class Simulated:
    """A model in time; ticks until it is what it is to be."""

    name: str
    ready: float
    asleep: float
    devices: tuple[str, ...]
    pinned: bool
    anywhere: bool = False
    weights: float = 0.0
    """On a GPU: what its host holds of it while it sleeps."""
    presence: Presence = Presence.UNLOADED
    before: float = 0.0
    before_on_host: float = 0.0
    ticks: int = 0
    drains: bool = False
    since: float = -1000.0
    used: float = -1000.0
    busy_until: float = 0.0
    came: list[float] = field(default_factory=list)
    went_for_another: list[float] = field(default_factory=list)

    def takes(self, presence: Presence) -> float:
        by_presence = {Presence.READY: self.ready, Presence.ASLEEP: self.asleep}
        return by_presence.get(presence, 0.0)

    @property
    def held(self) -> float:
        here = self.takes(self.presence)
        return max(here, self.before) if self.ticks else here

    @property
    def host_bytes(self) -> dict[Presence, float]:
        if not self.weights:
            return {}
        return {Presence.READY: _ENGINE, Presence.ASLEEP: _ENGINE + self.weights}

    @property
    def host_held(self) -> float:
        here = self.host_bytes.get(self.presence, 0.0)
        return max(here, self.before_on_host) if self.ticks else here

    def held_in(self, pool: str) -> float:
        if pool.removesuffix(HOST) not in self.devices:
            return 0.0
        return self.host_held if pool.endswith(HOST) else self.held

    def view(self, now: float) -> ElasticModel:
        return ElasticModel(
            name=self.name, presence=self.presence, settled=not self.ticks,
            since_s=now - self.since,
            idle_s=0.0 if now < self.busy_until else now - self.used + 0.1,
            devices=self.devices, held_bytes=self.held, ready_bytes=self.ready,
            asleep_bytes=self.asleep, wake_s=0.5, load_s=4.0, pinned=self.pinned,
            choices=self.choices, heat=float(now < self.busy_until),
            sleep_after_s=40.0, unload_after_s=200.0,
            host_held_bytes=self.host_held, host_bytes=self.host_bytes,
        )  # fmt: skip

    @property
    def choices(self) -> tuple[str, ...]:
        gone = self.presence is Presence.UNLOADED and not self.ticks
        return ("d", "e") if self.anywhere and gone and len(self.devices) == 1 else ()

    def become(self, presence: Presence, now: float, *, drains: bool = False) -> None:
        self.before, self.before_on_host = self.held, self.host_held
        load = self.presence is Presence.UNLOADED
        self.presence, self.since, self.drains = presence, now, drains
        self.ticks = _GO_TICKS
        if presence is Presence.READY:
            self.ticks = _LOAD_TICKS if load else _WAKE_TICKS
            self.came.append(now)


class World:
    """Models, and the requests that wait for them."""

    def __init__(self, models: list[Simulated], budgets: dict[str, float]) -> None:
        self.models = {each.name: each for each in models}
        self.budgets = budgets
        self.waiting: dict[str, float] = {}
        self.waiting_at: Mapping[str, str] = {}
        self.now = 0.0
        self.refused = 0

    def ask(self, name: str, seconds: float) -> None:
        model = self.models[name]
        if model.presence is Presence.READY and not model.ticks:
            model.busy_until = max(model.busy_until, self.now + seconds)
            model.used = model.busy_until
        else:
            self.waiting.setdefault(name, self.now)

    def tick(self) -> ElasticDecision:
        self.now += _TICK_S
        for model in self.models.values():
            if not (model.drains and self.now < model.busy_until):
                model.ticks = max(0, model.ticks - 1)
        for name in list(self.waiting):
            model = self.models[name]
            if model.presence is Presence.READY and not model.ticks:
                del self.waiting[name]
                self.ask(name, 1.0)
        at = self.waiting_at
        demands = [ModelDemand(x, self.now - since, at.get(x)) for x, since in self.waiting.items()]
        views = [each.view(self.now) for each in self.models.values()]
        decision = decide(ElasticSnapshot(views, demands, self.budgets), RULES)
        self._check(decision)
        self.waiting_at = decision.waiting_at
        for change in decision.changes:
            model = self.models[change.model]
            if change.device is not None:
                assert change.device in model.choices
                assert change.why_there
                model.devices = (change.device,)
            model.become(change.presence, self.now, drains=change.drains)
        for refusal in decision.refused:
            del self.waiting[refusal.model]
            self.refused += 1
        return decision

    def _check(self, decision: ElasticDecision) -> None:
        names = [each.model for each in decision.changes]
        assert len(names) == len(set(names))
        for change in decision.changes:
            model = self.models[change.model]
            if change.presence is not Presence.READY:
                assert not model.pinned
                assert change.drains == (self.now < model.busy_until)
                assert not model.ticks
                assert change.model not in self.waiting
                if model.presence is Presence.READY and not change.why.startswith("idle"):
                    assert self.now - model.since >= RULES.residence_s

    def check_budgets(self) -> None:
        for pool, budget in self.budgets.items():
            assert sum(each.held_in(pool) for each in self.models.values()) <= budget + 1e-9


MODELS = st.lists(
    st.builds(
        Simulated,
        name=st.uuids().map(str),
        ready=st.floats(2, 12),
        asleep=st.floats(0, 2),
        devices=st.sampled_from([("d",), ("e",), ("d", "e")]),
        pinned=st.booleans(),
        anywhere=st.booleans(),
        weights=st.sampled_from([0.0, 0.5, 2.0, 4.0]),
    ),
    min_size=1,
    max_size=6,
)
HOSTS = st.floats(0.5, 12)
ASKED = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0.5, 30)) | st.none(), min_size=20, max_size=120
)


def budgets_of(budget: float, host: float) -> dict[str, float]:
    return {"d": budget, "e": budget, "d" + HOST: host, "e" + HOST: host}


@given(MODELS, ASKED, st.floats(8, 25), HOSTS)
def test_budgets_hold_and_nobody_goes_who_must_not(
    models: list[Simulated], asked: list[tuple[int, float] | None], budget: float, host: float
) -> None:
    world = World(models, budgets_of(budget, host))
    names = list(world.models)
    for each in asked:
        if each is not None:
            world.ask(names[each[0] % len(names)], each[1])
        world.tick()
        world.check_budgets()


@given(MODELS, ASKED, st.floats(8, 25), HOSTS)
def test_every_demand_is_met_or_refused_in_bounded_time(
    models: list[Simulated], asked: list[tuple[int, float] | None], budget: float, host: float
) -> None:
    world = World(models, budgets_of(budget, host))
    names = list(world.models)
    for each in asked:
        if each is not None:
            world.ask(names[each[0] % len(names)], each[1])
        world.tick()
        longest = max((world.now - at for at in world.waiting.values()), default=0.0)
        # Each that came before it may have to wait for one that stays for a while, and to load.
        rounds = len(names) * (RULES.residence_s + _GO_TICKS + _LOAD_TICKS)
        assert longest <= rounds


@given(st.floats(0.5, 15), st.integers(1, 60))
def test_one_that_always_has_requests_starves_nobody_and_is_not_starved(
    seconds: float, asked_at: int
) -> None:
    models = [
        Simulated(name, ready=8.0, asleep=1.0, devices=("d",), pinned=False) for name in ("a", "b")
    ]
    world = World(models, {"d": 10.0})
    for tick in range(400):
        world.ask("a", seconds)
        if tick == asked_at:
            world.ask("b", seconds)
        world.tick()
    assert not world.refused
    (came,) = models[1].came
    turn_s = RULES.residence_s + _LOAD_TICKS + _GO_TICKS + seconds + 2 * _TICK_S
    # Both may have to wait for one that has just come.
    assert came - asked_at <= 2 * turn_s
    assert models[0].came[-1] - came <= turn_s


@given(st.lists(st.sampled_from(["a", "b"]), min_size=50, max_size=300))
def test_two_models_that_do_not_fit_together_take_turns_no_faster_than_residence(
    asked: list[str],
) -> None:
    models = [
        Simulated(name, ready=8.0, asleep=1.0, devices=("d",), pinned=False) for name in ("a", "b")
    ]
    world = World(models, {"d": 10.0})
    for name in asked:
        world.ask(name, 0.1)
        world.tick()
    came = sorted(at for each in models for at in each.came)
    assert all(later - earlier >= RULES.residence_s for earlier, later in pairwise(came))


def test_who_asks_first_is_met_first() -> None:
    models = [
        Simulated(name, ready=8.0, asleep=0.0, devices=("d",), pinned=False) for name in "abcd"
    ]
    world = World(models, {"d": 10.0})
    for name in "cadb":
        world.ask(name, 0.1)
    for _ in range(200):
        world.tick()
        for name in "cadb":
            if not world.models[name].came and name not in world.waiting:
                world.ask(name, 0.1)
    first = sorted("abcd", key=lambda name: world.models[name].came[0])
    assert first == list("cadb")
