"""One replica at a time gives its memory back, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loomserve.deployments.controller.memory_relief import MemoryRelief
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import DesiredState
from loomserve.platform.state import Presence
from tests.unit.platform.fleet.heartbeats import report

pytestmark = pytest.mark.anyio
M = Model(name="m", source="demo", devices=("core0", "core1"))
ALONE = Model(name="alone", source="demo", devices=("core0",))
ON_DEMAND = Model(name="on-demand", source="demo", devices=("core0",), start="on_demand")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Mover:
    """What models are to be."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Presence, str]] = []
        self.notes: list[tuple[str, Presence, str]] = []

    def begin(self, name: str, presence: Presence, why: str) -> None:
        self.begun.append((name, presence, why))

    def note(self, name: str, presence: Presence, why: str) -> None:
        self.notes.append((name, presence, why))


class Scene:
    """A fleet on one node or two, whose clock and memory a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        devices = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1,)))
        self.fleet = Fleet(devices, drain_timeout_s=60)
        for model, target in ((M, 2), (ALONE, 1), (ON_DEMAND, 1)):
            self.fleet.registry.add(model, target)
        self.mover = Mover()
        mover: Any = self.mover
        self.relief = MemoryRelief(self.fleet, mover, lambda: self.now)
        self.replicas: dict[str, dict[str, Any]] = {}

    def add(self, name: str, model: Model, node: str = "127.0.0.1", in_flight: int = 0) -> None:
        address = f"{name}.{node}"
        self.replicas[name] = {"model": model, "address": address, "in_flight": in_flight}

    def beat(self, used: float | Callable[[str], float]) -> dict[str, DesiredState]:
        """All replicas say how much memory is used."""
        return {
            name: self.fleet.report(
                report(name, memory_used=used(name) if callable(used) else used, **values),
                self.now,
            )
            for name, values in self.replicas.items()
        }

    async def pass_time(self, seconds: float, used: float | Callable[[str], float]) -> set[str]:
        """Two heartbeats a second later and so on; those that were told to give memory back."""
        told = set[str]()
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            told |= {name for name, state in self.beat(used).items() if state.gives_back}
            await self.relief._look()
        return told


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.add("m-0", M)
    made.add("m-1", M)
    made.add("alone-0", ALONE)
    return made


async def test_memory_below_the_threshold_costs_nothing(scene: Scene) -> None:
    assert await scene.pass_time(60, 0.949) == set()
    scene.relief.check()


async def test_a_short_peak_costs_nothing(scene: Scene) -> None:
    for _ in range(5):
        assert await scene.pass_time(1.5, 0.99) == set()
        assert await scene.pass_time(2, 0.5) == set()


async def test_one_ends_and_the_next_only_if_that_was_not_enough(scene: Scene) -> None:
    first = await scene.pass_time(14, 0.97)
    assert len(first) == 1
    assert first < {"m-0", "m-1"}
    ((model, presence, why),) = scene.mover.notes
    assert (model, presence) == ("m", Presence.READY)
    assert first.pop() in why
    assert "97%" in why
    # It has gone, and memory is short all the same.
    gone = next(iter(scene.fleet.gives_back))
    del scene.replicas[gone]
    second = await scene.pass_time(14, 0.97)
    # Of m there is no other any more: the idle ones are equal, and only one of them ends.
    assert len(second) == 1
    assert gone not in scene.fleet.gives_back


async def test_the_last_with_requests_stays_as_long_as_there_is_another(scene: Scene) -> None:
    scene.replicas["alone-0"]["in_flight"] = 3
    scene.replicas["m-0"]["in_flight"] = 3
    assert await scene.pass_time(10, 0.97) == {"m-1"}
    del scene.replicas["m-1"]
    scene.replicas["m-0"]["in_flight"] = 0
    await scene.pass_time(8, 0.97)
    assert await scene.pass_time(4, 0.97) == {"m-0"}
    del scene.replicas["m-0"]
    assert await scene.pass_time(20, 0.97) == {"alone-0"}


async def test_it_ends_none_once_memory_has_come_back(scene: Scene) -> None:
    assert len(await scene.pass_time(5, 0.97)) == 1
    del scene.replicas[next(iter(scene.fleet.gives_back))]
    assert await scene.pass_time(60, 0.6) == set()


async def test_an_idle_model_that_comes_again_is_unloaded_first(scene: Scene) -> None:
    scene.add("on-demand-0", ON_DEMAND)
    assert await scene.pass_time(5, 0.97) == set()
    ((model, presence, why),) = scene.mover.begun
    assert (model, presence) == ("on-demand", Presence.UNLOADED)
    assert "this machine's memory" in why


async def test_each_node_is_looked_at_by_itself(scene: Scene) -> None:
    scene.add("m-2", M, node="10.0.0.2")

    def used(name: str) -> float:
        return 0.97 if name == "m-2" else 0.5

    assert await scene.pass_time(5, used) == {"m-2"}
    ((_, _, why),) = scene.mover.notes
    assert "10.0.0.2" in why


async def test_loads_are_refused_while_memory_is_short(scene: Scene) -> None:
    scene.beat(0.97)
    with pytest.raises(Unavailable, match="97%") as refused:
        scene.relief.check()
    assert refused.value.code == "memory_short"
    scene.beat(0.9)
    scene.relief.check()
