"""Replicas by load over a fleet that reports what it is told: started, drained, taken back, kept.

Serve is made up: it has as many replicas as it is told, each on the next device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.config import Model
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.rebalancing.controller import Rebalancer
from loomserve.platform.rebalancing.plans.reports import (
    EventKind,
    Kept,
    RebalancingState,
    ScalingReport,
)
from loomserve.platform.rebalancing.plans.store import PlanStore
from loomserve.platform.rebalancing.policy.actions import AddReplica, RemoveReplica
from loomserve.platform.rebalancing.policy.measured import Measured
from loomserve.platform.rebalancing.scaler import Scaler
from loomserve.platform.state import Presence, ReplicaLoad
from tests.unit.platform.fleet.heartbeats import DEVICES, footprint, report

pytestmark = pytest.mark.anyio

NAME = "m"
RULES = {"min": 1, "max": 2, "target_ongoing_requests": 4, "downscale_delay_s": 20}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def model(**changes: Any) -> Model:
    given = {"name": NAME, "source": "demo", "devices": ("core0", "core1"), "replicas": RULES}
    return Model(**{**given, **changes})


@dataclass
class World:
    """A fleet, a Serve that is made up, and a clock."""

    folder: Path
    fleet: Fleet = field(default_factory=lambda: Fleet(DEVICES, drain_timeout_s=60))
    now: float = 1000.0
    ready: dict[str, float] = field(default_factory=lambda: {"core0": 1.0})
    """When the replica of a device has come."""
    running: dict[str, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    full: str = ""
    """Why there is no room."""

    def set_replicas(self, name: str, replicas: int) -> None:
        self.asked.append(replicas)
        self.fleet.registry.set_target(name, replicas)
        registry = self.fleet.registry
        gone = registry.drains.leaving | registry.drains.ending
        order = sorted(self.ready, key=lambda at: (f"on-{at}" in gone, self.ready[at]))
        for device in order[replicas:]:
            del self.ready[device]
        for device in ("core0", "core1"):
            if len(self.ready) < replicas and device not in self.ready:
                self.ready[device] = self.now

    def room_for(self, name: str, device: str) -> str:
        return self.full

    def report(self) -> None:
        registry = self.fleet.registry
        for device, ready_at in self.ready.items():
            id_ = f"on-{device}"
            known = registry.find(id_)
            running = self.running.get(device, 0)
            # Draining replicas' requests go on elsewhere.
            if known is not None and known.draining and len(self.ready) > 1:
                other = next(each for each in self.ready if each != device)
                self.running[other] = self.running.get(other, 0) + running
                self.running[device] = running = 0
            load = ReplicaLoad(
                running=running, waiting=0, kv_cache_usage=0.1, step_time_s=0.01, measured_at=0.0
            )
            made = footprint(memory_measured_at=self.now, start_s=3.0, ready_at=ready_at)
            told = report(
                id_, device, model=registry.record(NAME).model, load=load, told_at=self.now,
                footprint=made, in_flight=running,
                draining=known is not None and known.draining,
            )  # fmt: skip
            self.fleet.report(told, self.now)

    def observe(self, changed_at_s: float) -> Measured:
        return Measured(None, (), self.fleet.registry.snapshot(self.now).scaled)

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[Rebalancer]:
        scaler = Scaler(self.fleet, self.set_replicas, self.room_for, Rebalancing())
        made = Rebalancer(
            Rebalancing(), PlanStore(self.folder), self.observe, {}, lambda: self.now, scaler
        )
        try:
            yield made
        finally:
            await made.close()

    async def run(self, controller: Rebalancer, seconds: int) -> None:
        for _ in range(seconds):
            self.report()
            await controller.tick()
            self.now += 1.0

    @property
    def draining(self) -> list[str]:
        return [each.id for each in self.fleet.registry.live(NAME, self.now) if each.draining]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path / "plans")
    made.fleet.registry.add(model(), 1)
    return made


def of_models(state: RebalancingState) -> ScalingReport:
    assert state.scaling is not None
    return state.scaling


def counted(state: RebalancingState) -> dict[tuple[str, str], int]:
    return {(each.direction, each.reason): each.count for each in of_models(state).decisions}


async def test_more_requests_start_a_replica_within_seconds_and_it_is_said_why(
    world: World,
) -> None:
    async with world.controller() as controller:
        world.running["core0"] = 3
        await world.run(controller, 10)
        assert world.asked == []
        world.running["core0"] = 7
        await world.run(controller, 5)
        assert world.asked == [2]
        state = controller.state()
        assert counted(state) == {("up", "requests"): 1}
        (seen,) = of_models(state).models
        assert (seen.model, seen.replicas, seen.load) == (NAME, 2, pytest.approx(1.75))
        (event,) = await controller.events(10)
        assert event.kind is EventKind.SCALED
        assert event.action == AddReplica(model=NAME, device="core1")
        (shown,) = world.fleet.views.models(world.now)
        assert shown.scaling is not None
        assert shown.scaling.why == event.message
        assert event.message.startswith("requests exceed")


async def test_a_replica_is_drained_before_it_is_ended_and_its_requests_go_on(
    world: World,
) -> None:
    async with world.controller() as controller:
        world.running["core0"] = 7
        await world.run(controller, 5)
        world.running.update(core0=1, core1=1)
        world.asked.clear()
        await world.run(controller, 19)
        assert (world.draining, world.asked) == ([], [])
        while not world.draining:
            assert world.now < 1100
            await world.run(controller, 1)
        # It has a request, which has to go on elsewhere first.
        assert world.draining == ["on-core1"]
        assert world.asked == []
        await world.run(controller, 2)
        assert world.asked == [1]
        assert list(world.ready) == ["core0"]
        assert world.running == {"core0": 2, "core1": 0}
        newest = (await controller.events(10))[0]
        assert newest.action == RemoveReplica(engine="on-core1")
        await world.run(controller, 100)
        assert world.asked == [1]
        assert (
            world.fleet.registry.drains.leaving
            == world.fleet.registry.drains.ending - {"on-core1"}
            == set()
        )


async def test_a_replica_that_has_loans_or_requests_still_is_not_ended(world: World) -> None:
    async with world.controller() as controller:
        world.running["core0"] = 7
        await world.run(controller, 5)
        world.asked.clear()
        world.running.clear()
        for _ in range(60):
            world.report()
            # What it has does not move.
            stays = world.fleet.registry.find("on-core1")
            assert stays is not None
            stays.heartbeat = stays.heartbeat.model_copy(update={"in_flight": 1})
            await controller.tick()
            world.now += 1
        assert world.draining == ["on-core1"]
        assert world.asked == []


async def test_one_that_is_drained_takes_requests_again_if_the_load_rises(world: World) -> None:
    async with world.controller() as controller:
        world.running["core0"] = 7
        await world.run(controller, 5)
        world.running.clear()
        world.asked.clear()
        while not world.draining:
            await world.run(controller, 1)
        kept = world.fleet.registry.find("on-core1")
        assert kept is not None
        for _ in range(6):
            world.report()
            kept = world.fleet.registry.find("on-core1")
            assert kept is not None
            kept.heartbeat = kept.heartbeat.model_copy(update={"in_flight": 1})
            hot = world.fleet.registry.find("on-core0")
            assert hot is not None
            load = hot.heartbeat.stats.load
            assert load is not None
            hot.note_stats(
                hot.heartbeat.stats.model_copy(
                    update={"load": load.model_copy(update={"running": 9})}
                )
            )
            await controller.tick()
            world.now += 1
        assert world.draining == []
        assert world.asked == []
        assert sum(n for (way, _), n in counted(controller.state()).items() if way == "up") == 2


async def test_where_there_is_no_room_none_is_started_and_it_is_said_once(world: World) -> None:
    world.full = "core1 has no memory for it"
    async with world.controller() as controller:
        world.running["core0"] = 9
        await world.run(controller, 30)
        assert world.asked == []
        assert counted(controller.state()) == {("held", "no_memory"): 1}
        (shown,) = world.fleet.views.models(world.now)
        assert shown.scaling is not None
        assert shown.scaling.why.endswith(world.full)
        world.full = ""
        await world.run(controller, 1)
        assert world.asked == [2]


async def test_a_number_that_an_operator_has_set_stays(world: World) -> None:
    async with world.controller() as controller:
        world.fleet.registry.record(NAME).fix(True)
        world.running["core0"] = 9
        await world.run(controller, 30)
        assert world.asked == []
        (shown,) = world.fleet.views.models(world.now)
        assert shown.scaling is not None
        assert shown.scaling.fixed
        world.fleet.registry.record(NAME).fix(False)
        await world.run(controller, 5)
        assert world.asked == [2]


async def test_an_operator_who_sets_a_number_takes_back_who_was_to_go(world: World) -> None:
    world.fleet.registry.set_target(NAME, 2)
    world.ready["core1"] = 2.0
    async with world.controller() as controller:
        while not world.draining:
            assert world.now < 1100
            await world.run(controller, 1)
        world.fleet.registry.record(NAME).fix(True)
        await world.run(controller, 30)
        assert (world.draining, world.asked) == ([], [])


async def test_a_model_that_is_put_away_comes_back_with_the_fewest(world: World) -> None:
    async with world.controller() as controller:
        world.running["core0"] = 9
        await world.run(controller, 5)
        registry = world.fleet.registry
        registry.set_presence(NAME, Presence.UNLOADED, world.now, "idle")
        world.ready.clear()
        await world.run(controller, 2)
        assert registry.record(NAME).target_replicas == 1
        assert of_models(controller.state()).models == ()


async def test_the_next_controller_goes_on_with_what_this_one_began(world: World) -> None:
    world.running["core0"] = 7
    async with world.controller() as controller:
        await world.run(controller, 5)
        world.running.clear()
        while not world.draining:
            await world.run(controller, 1)
        world.report()
    world.asked.clear()
    kept = world.fleet.wishes()
    assert kept.leaving == ("on-core1",)
    after = World(world.folder, ready=world.ready, now=world.now)
    after.fleet.restore(kept)
    async with after.controller() as controller:
        await after.run(controller, 2)
        assert after.asked == [1]
        assert list(after.ready) == ["core0"]
    assert after.fleet.wishes().ending == ("on-core1",)


async def test_what_was_too_few_is_known_to_the_next_controller(world: World) -> None:
    for second in range(11):
        world.fleet.registry.rates.take("on-core0", float(second), {"requests": 5.0 * second})
    kept = Kept(mode="off", configured="off")
    for more in (True, False):
        scaler = Scaler(world.fleet, world.set_replicas, world.room_for, Rebalancing())
        one = Rebalancer(
            Rebalancing(), PlanStore(world.folder), world.observe, {}, lambda: world.now, scaler
        )
        world.running = {"core0": 7} if more else {}
        await world.run(one, 5 if more else 60)
        assert scaler.kept(kept, 0.0).shortages[NAME][1].arrived_per_s == pytest.approx(5.0)
        # As many requests as ever come: one replica was too few for them.
        assert world.asked == [2]
        await one.close()
