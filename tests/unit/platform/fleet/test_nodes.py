"""Nodes that are up, drained and empty, and the gateways that report from them."""

from __future__ import annotations

import pytest

from loomserve.platform.access.policy.bank import LimitReport
from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.nodes import GATEWAY_EXPIRES_S, GatewayHeartbeat
from loomserve.platform.state import NodeStatus
from tests.unit.platform.fleet.heartbeats import report

DEVICES = (
    Device(name="a0", cores=(0,), node="a"),
    Device(name="b0", cores=(0,), node="b"),
    Device(name="c0", cores=(0,), node="c"),
)
MODEL = Model(name="m", source="demo", devices=("a0", "b0"))
ONLY_HERE = Model(name="only", source="demo", devices=("b0",))


def fleet(*models: Model) -> Fleet:
    made = Fleet(DEVICES, drain_timeout_s=60)
    for model in models or (MODEL,):
        made.registry.add(model, len(model.devices))
        for device in model.devices:
            made.report(report(f"{model.name}-{device}", device, model=model), 0.0)
    made.nodes.up = frozenset("abc")
    made.nodes.state_node = "a"
    return made


def heartbeat(gateway: str, node: str, sequences: int = 0) -> GatewayHeartbeat:
    return GatewayHeartbeat(f"at {gateway}", sequences, LimitReport(gateway, node, ()))


def statuses(of: Fleet, now: float = 1.0) -> dict[str, NodeStatus]:
    return {each.name: each.status for each in of.nodes.state(now)}


def test_a_drained_nodes_replicas_drain_and_those_that_come_later_too() -> None:
    some = fleet()
    some.nodes.drain("b", 1.0)
    assert statuses(some) == {"a": "up", "b": "draining", "c": "up"}
    draining = {each.id: each.draining for each in some.views.models(1.0)[0].replicas}
    assert draining == {"m-a0": False, "m-b0": True}
    assert some.report(report("m-b0", "b0", model=MODEL), 1.5).draining
    assert some.report(report("later", "b0", model=MODEL), 1.5).draining
    assert not some.report(report("m-a0", "a0", model=MODEL), 1.5).draining
    some.nodes.undrain("b")
    assert statuses(some, 2.0)["b"] == "up"
    assert not some.report(report("m-b0", "b0", model=MODEL), 2.0).draining


def test_a_replica_that_was_drained_singly_stays_so() -> None:
    some = fleet()
    some.registry.set_draining("m-b0", True)
    some.nodes.drain("b", 1.0)
    some.nodes.undrain("b")
    assert some.report(report("m-b0", "b0", model=MODEL), 2.0).draining


def test_a_node_is_drained_once_nothing_is_open_on_it() -> None:
    some = fleet()
    some.nodes.take(heartbeat("g", "b", sequences=2), 1.0)
    some.nodes.drain("b", 1.0)
    assert statuses(some, 5.0)["b"] == "draining"
    # Its replica has ended, and its gateway has a stream yet.
    some.nodes.take(heartbeat("g", "b", sequences=1), 12.0)
    assert statuses(some, 12.0)["b"] == "draining"
    some.nodes.take(heartbeat("g", "b"), 13.0)
    # Ray has yet to leave it, with which all ends that would be started there meanwhile.
    assert statuses(some, 13.0)["b"] == "draining"
    some.nodes.leave("b")
    assert statuses(some, 13.0)["b"] == "draining"
    some.nodes.follow(frozenset("ac"), frozenset())
    assert statuses(some, 13.0)["b"] == "drained"
    some.nodes.follow(frozenset("abc"), frozenset())
    assert statuses(some, 13.0)["b"] == "drained"
    assert some.nodes.usable == frozenset("ac")
    some.nodes.undrain("b")
    assert statuses(some, 13.0)["b"] == "up"


def test_a_drained_node_whose_machine_ends_is_drained() -> None:
    some = fleet()
    some.nodes.drain("b", 1.0)
    some.nodes.follow(frozenset("ac"), frozenset())
    assert statuses(some, 12.0)["b"] == "drained"


def test_a_node_that_ray_leaves_gets_nothing_until_it_is_back() -> None:
    some = fleet()
    some.nodes.drain("b", 1.0)
    some.nodes.leave("b")
    some.nodes.undrain("b")
    for leaving in (some.nodes.leaving, frozenset("b")):
        some.nodes.follow(frozenset("abc"), leaving)
        assert statuses(some)["b"] == "draining"
        assert some.nodes.usable == frozenset("ac")
        assert some.report(report("m-b0", "b0", model=MODEL), 2.0).draining
    some.nodes.follow(frozenset("ac"), frozenset())
    assert statuses(some)["b"] == "down"
    some.nodes.follow(frozenset("abc"), frozenset())
    assert statuses(some)["b"] == "up"
    assert not some.report(report("m-b0", "b0", model=MODEL), 2.0).draining


def test_a_node_that_ray_leaves_by_itself_gets_nothing() -> None:
    some = fleet()
    some.nodes.follow(frozenset("abc"), frozenset("b"))
    assert statuses(some)["b"] == "draining"
    assert some.report(report("m-b0", "b0", model=MODEL), 2.0).draining


def test_what_has_no_other_place_is_not_drained() -> None:
    some = fleet(MODEL, ONLY_HERE)
    with pytest.raises(Conflict, match="'only' would have no replica"):
        some.nodes.drain("b", 1.0)
    with pytest.raises(Conflict, match="what there is but once"):
        some.nodes.drain("a", 1.0)
    some.nodes.drain("c", 1.0)
    some.nodes.up = frozenset("ab")
    with pytest.raises(NotFound, match="the nodes are: a, b, c"):
        some.nodes.drain("d", 1.0)
    assert statuses(some)["c"] == "drained"


def test_the_last_node_is_not_drained() -> None:
    some = fleet()
    some.nodes.up = frozenset("b")
    assert statuses(some) == {"a": "down", "b": "up", "c": "down"}
    with pytest.raises(Conflict, match="the only one that is up"):
        some.nodes.drain("b", 1.0)
    alone = Fleet([Device(name="core0", cores=(0,))], drain_timeout_s=60)
    assert statuses(alone) == {"local": "up"}
    with pytest.raises(Conflict):
        alone.nodes.drain("local", 1.0)


def test_a_drained_node_is_no_place_for_another() -> None:
    some = fleet()
    some.nodes.state_node = "c"
    some.nodes.drain("a", 1.0)
    with pytest.raises(Conflict, match="'m' would have no replica"):
        some.nodes.drain("b", 1.0)


def test_what_is_drained_outlives_a_controller() -> None:
    some = fleet()
    some.nodes.drain("b", 1.0)
    again = Fleet(DEVICES, drain_timeout_s=60)
    again.restore(some.wishes())
    assert again.report(report("m-b0", "b0", model=MODEL), 1.0).draining
    assert statuses(again)["b"] == "draining"
    # Ray leaves it, and it joins anew.
    again.nodes.leave("b")
    third = Fleet(DEVICES, drain_timeout_s=60)
    third.restore(again.wishes())
    third.nodes.follow(frozenset("abc"), frozenset())
    assert statuses(third)["b"] == "drained"


def test_gateways_are_told_of_each_other_until_they_are_silent_or_end() -> None:
    some = fleet()
    assert some.nodes.take(heartbeat("g", "a"), 1.0) == {}
    assert some.nodes.take(heartbeat("h", "b"), 1.5) == {"at g": "a"}
    assert some.nodes.take(heartbeat("g", "a"), 2.0) == {"at h": "b"}
    assert [each.gateways for each in some.nodes.state(2.0)] == [1, 1, 0]
    some.nodes.gateway_ended("h")
    assert some.nodes.take(heartbeat("g", "a"), 3.0) == {}
    some.nodes.take(heartbeat("h", "b"), 3.0)
    assert some.nodes.take(heartbeat("g", "a"), 3.0 + GATEWAY_EXPIRES_S) == {}
