"""What the controller has Serve and Ray do as nodes come, go and are drained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from loomserve.deployments.controller.nodes import NodeKeeper
from loomserve.deployments.ray_node import LivingNode
from loomserve.platform.access.policy.bank import LimitBank, LimitReport
from loomserve.platform.access.policy.pools import Limit, LimitKind, Use
from loomserve.platform.config import Config
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import GATEWAY_APP, gateway_app
from tests.unit.platform.fleet.heartbeats import report
from tests.unit.platform.fleet.test_nodes import MODEL


class Apps:
    def __init__(self) -> None:
        self.up = {"a": LivingNode("ray-a", has_state=True), "b": LivingNode("ray-b", False)}
        self.gateways: set[str] = set()
        self.drained: list[str] = []
        self.fails = False

    async def nodes(self) -> dict[str, LivingNode]:
        return self.up

    async def statuses(self) -> dict[str, Any]:
        return dict.fromkeys([GATEWAY_APP, *map(gateway_app, self.gateways)])

    async def start_gateway(self, node: str) -> None:
        if self.fails:
            raise RuntimeError("Serve is away")
        assert node not in self.gateways
        self.gateways.add(node)

    async def end_on(self, node: str) -> None:
        self.gateways.discard(node)

    async def drain_node(self, ray_id: str, deadline_s: float) -> None:
        self.drained.append(ray_id)
        await self.meanwhile()
        if self.fails:
            raise RuntimeError("Ray is away")
        self.up = {
            name: replace(node, is_leaving=node.is_leaving or node.ray_id == ray_id)
            for name, node in self.up.items()
        }

    async def meanwhile(self) -> None:
        """What happens while Ray is being told."""


class Models:
    def __init__(self) -> None:
        self.told: list[tuple[frozenset[str], frozenset[str]]] = []

    def set_nodes(self, up: frozenset[str], drained: frozenset[str]) -> None:
        self.told.append((up, drained))


class Stores:
    def __init__(self) -> None:
        self.taken_over: list[str] = []

    async def take_over(self, name: str) -> int:
        self.taken_over.append(name)
        return 1


class Scene:
    def __init__(self, gateways: str = "each_node") -> None:
        self.config = Config(
            cluster={"address": "a:1", "gateways": gateways},
            devices=[
                {"name": "a0", "cores": (0,), "node": "a"},
                {"name": "b0", "cores": (0,), "node": "b"},
            ],
            models=[MODEL],
            server={"front_ends": 2, "drain_timeout_s": 30},
        )
        self.fleet = Fleet(self.config.devices, drain_timeout_s=30)
        self.fleet.registry.add(MODEL, 2)
        self.apps, self.models, self.published = Apps(), Models(), 0
        self.now = 100.0
        self.limits = LimitBank(0.0)
        self.stores = Stores()
        fakes: Any = (self.models, self.apps, self.limits, self.stores, self._publish)
        self.keeper = NodeKeeper(self.config, self.fleet, *fakes, clock=lambda: self.now)

    async def _publish(self) -> None:
        self.published += 1

    def follow(self, to: float | None = None) -> None:
        self.now = self.now if to is None else to
        asyncio.run(self.keeper.follow())


def asks_for_a_day(limits: LimitBank, node: str, now: float) -> float:
    """The tokens that a node's gateway gets of a day's thousand."""
    use = Use(Limit("key 1", LimitKind.DAY, 1000), used=0, in_hand=0, wanted=1000)
    return limits.exchange(LimitReport(node, node, (use,)), now).slices[0].more


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_each_node_that_is_up_has_its_gateways(scene: Scene) -> None:
    scene.follow()
    scene.follow()
    # The node with the state has had its own from the start.
    assert scene.apps.gateways == {"b"}
    assert scene.fleet.nodes.up == {"a", "b"}
    assert scene.fleet.nodes.state_node == "a"
    scene.apps.up["c"] = LivingNode("ray-c", has_state=False)
    scene.follow()
    assert scene.apps.gateways == {"b", "c"}
    del scene.apps.up["b"]
    scene.follow()
    # They come back with their node.
    assert scene.apps.gateways == {"b", "c"}
    assert scene.models.told[-1] == (frozenset("ac"), frozenset())


def test_a_days_tokens_of_a_node_are_others_once_ray_says_that_it_is_gone(scene: Scene) -> None:
    assert asks_for_a_day(scene.limits, "b", 100.0) == 1000
    scene.follow()
    # It may be cut off, and go on.
    assert asks_for_a_day(scene.limits, "a", 200.0) == 0
    del scene.apps.up["b"]
    scene.follow()
    assert asks_for_a_day(scene.limits, "a", 201.0) == 1000


def test_what_serve_did_not_start_is_started_later(scene: Scene) -> None:
    scene.apps.fails = True
    with pytest.raises(RuntimeError):
        scene.follow()
    scene.apps.fails = False
    scene.follow()
    assert scene.apps.gateways == {"b"}


def test_gateways_of_one_node_stay_as_they_are() -> None:
    scene = Scene("one_node")
    scene.follow()
    assert scene.apps.gateways == set()
    assert scene.published == 1


def test_ray_leaves_a_drained_node_last_and_once(scene: Scene) -> None:
    scene.follow()
    scene.fleet.report(report("m-a0", "a0", model=MODEL), scene.now)
    scene.fleet.report(report("m-b0", "b0", model=MODEL), scene.now)
    scene.fleet.nodes.drain("b", scene.now)
    scene.follow()
    scene.follow()
    assert scene.stores.taken_over == ["b"]
    assert scene.models.told[-1] == (frozenset("ab"), frozenset("b"))
    assert scene.apps.gateways == {"b"}
    # Its replica reports no more; and gateways' balancers have had time to ask.
    scene.follow(112)
    assert scene.apps.drained == ["ray-b"]
    assert scene.apps.gateways == set()
    scene.follow(120)
    assert scene.apps.drained == ["ray-b"]
    # Drained another time, as another of Ray's nodes.
    scene.fleet.nodes.undrain("b")
    scene.apps.up["b"] = LivingNode("ray-b2", has_state=False)
    scene.follow(121)
    assert scene.apps.gateways == {"b"}
    scene.fleet.report(report("m-a0", "a0", model=MODEL), scene.now)
    scene.fleet.nodes.drain("b", scene.now)
    scene.follow(140)
    assert scene.apps.drained == ["ray-b", "ray-b2"]
    assert scene.stores.taken_over == ["b", "b"]


def test_a_node_that_does_not_get_empty_is_left_after_its_time(scene: Scene) -> None:
    scene.follow()
    scene.fleet.nodes.drain("b", scene.now)
    for now in (109, 118, 127):
        scene.fleet.report(report("m-b0", "b0", model=MODEL), now)
        scene.follow(now)
    assert scene.apps.drained == []
    scene.fleet.report(report("m-b0", "b0", model=MODEL), 131)
    scene.follow(131)
    assert scene.apps.drained == ["ray-b"]


def test_a_drain_taken_back_as_ray_is_told_holds_until_the_node_is_back(scene: Scene) -> None:
    async def taken_back() -> None:
        scene.fleet.nodes.undrain("b")

    scene.apps.meanwhile = taken_back
    scene.follow()
    scene.fleet.report(report("m-a0", "a0", model=MODEL), scene.now)
    scene.fleet.nodes.drain("b", scene.now)
    scene.follow(112)
    for now in (113, 114):
        # Nothing is begun there that would end with it.
        scene.follow(now)
        assert scene.apps.gateways == set()
        assert scene.models.told[-1] == (frozenset("ab"), frozenset("b"))
    scene.apps.up["b"] = LivingNode("ray-b2", has_state=False)
    scene.follow(130)
    assert scene.apps.gateways == {"b"}
    assert scene.models.told[-1] == (frozenset("ab"), frozenset())


def test_ray_is_told_again_if_it_could_not_be_told(scene: Scene) -> None:
    scene.follow()
    scene.fleet.report(report("m-a0", "a0", model=MODEL), scene.now)
    scene.fleet.nodes.drain("b", scene.now)
    scene.apps.fails = True
    with pytest.raises(RuntimeError):
        scene.follow(112)
    scene.apps.fails = False
    scene.follow(114)
    scene.follow(116)
    assert scene.apps.drained == ["ray-b", "ray-b"]


def test_a_node_that_ray_leaves_by_itself_is_emptied(scene: Scene) -> None:
    scene.apps.up["b"] = LivingNode("ray-b", has_state=False, is_leaving=True)
    scene.follow()
    scene.follow()
    assert scene.apps.gateways == set()
    assert scene.models.told[-1] == (frozenset("ab"), frozenset("b"))
    assert scene.stores.taken_over == ["b"]
    # Whoever has told Ray so ends it.
    assert scene.apps.drained == []
    scene.apps.up["b"] = LivingNode("ray-b2", has_state=False)
    scene.follow()
    assert scene.apps.gateways == {"b"}
