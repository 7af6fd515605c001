"""What nodes offer to Ray, and what engines ask of it."""

from __future__ import annotations

from loomserve.platform.config import Device
from loomserve.platform.nodes.resources import (
    name_in,
    offered,
    offered_by_devices,
    on_devices,
    on_node,
    on_state,
)

CORES = Device(name="a", cores=(0, 1), node="n1")
OTHERS = Device(name="b", cores=(2,), node="n1")
GPU = Device(name="c", kind="cuda", gpu=1, node="n1")


def test_a_node_offers_what_its_devices_ask_for_and_what_others_do_not() -> None:
    there = offered("n1", range(3), range(2), state=True)
    for asked in (on_devices([CORES, OTHERS]), on_devices([GPU]), on_node("n1"), on_state()):
        assert asked
        assert asked.keys() <= there.keys()
        assert all(0 < share <= 0.001 for share in asked.values())
    elsewhere = offered("n2", range(3), range(2), state=False)
    for asked in (on_devices([CORES]), on_devices([GPU]), on_node("n1"), on_state()):
        assert not asked.keys() & elsewhere.keys()


def test_a_core_or_gpu_that_is_not_there_is_not_offered() -> None:
    assert not on_devices([OTHERS]).keys() <= offered("n1", range(2), range(2), state=True).keys()
    assert not on_devices([GPU]).keys() <= offered("n1", range(2), range(1), state=True).keys()


def test_a_lone_machine_offers_its_devices_and_all_that_there_is_but_once() -> None:
    devices = [Device(name="a", cores=(0, 5)), Device(name="g", kind="cuda", gpu=7)]
    there = offered_by_devices(devices)
    assert (on_devices(devices) | on_state() | on_node("local")).keys() == there.keys()


def test_nodes_of_others_have_no_name() -> None:
    assert name_in(offered("n1", (), (), state=False)) == "n1"
    assert name_in({"CPU": 2.0, "node:10.0.0.1": 1.0}) is None
