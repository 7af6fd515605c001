"""Devices on nodes: which configurations are right, and what is said of others."""

from __future__ import annotations

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import LOCAL_NODE, parse

GOOD = """\
cluster:
  address: 10.0.0.1:6379
devices:
  - name: a
    cores: [0]
    node: n1
  - name: b
    cores: [1]
    node: n1
  - name: c
    cores: [0]
    node: n2
models:
  - name: m
    source: demo
    devices: [a, c]
"""


def test_nodes_have_cores_of_the_same_numbers() -> None:
    config = parse(GOOD)
    assert config.nodes == ("n1", "n2")
    assert [device.on for device in config.devices] == ["n1", "n1", "n2"]


def test_without_a_cluster_all_devices_are_on_one_node() -> None:
    alone = GOOD.replace("cluster:\n  address: 10.0.0.1:6379\n", "")
    for node in ("    node: n1\n", "    node: n2\n"):
        alone = alone.replace(node, "")
    alone = alone.replace("cores: [0]", "cores: [2]", 1)
    config = parse(alone)
    assert config.cluster is None
    assert config.nodes == (LOCAL_NODE,)


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("    node: n2\n", "", "devices[2].node", "loomserve node --name"),
        ("cluster:\n  address: 10.0.0.1:6379\n", "", "devices[0].node", "add a cluster section"),
        ("node: n2", "node: n1", "devices[2].cores", "both claim core 0 of node 'n1'"),
        ("node: n2", "node: n/2", "devices[2].node", "pattern"),
        ("10.0.0.1:6379", "10.0.0.1", "cluster.address", "pattern"),
        ("10.0.0.1:6379", "ray://10.0.0.1:6379", "cluster.address", "pattern"),
        (
            "    devices: [a, c]\n",
            "    devices: [a, c]\n    pipeline: {}\n",
            "models[0].devices",
            "devices of one node",
        ),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, where: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GOOD.replace(old, new, 1), "my.yaml")
    assert where in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize("address", ["head.example:6379", "ray-head_0.svc:1", "[fd00::1]:6379"])
def test_the_head_is_named_by_host_or_address(address: str) -> None:
    config = parse(GOOD.replace("10.0.0.1:6379", f'"{address}"'))
    assert config.cluster is not None
    assert config.cluster.address == address


def test_the_address_may_come_from_the_environment() -> None:
    config = parse(GOOD.replace("  address: 10.0.0.1:6379", "  join_timeout_s: 5"))
    assert config.cluster is not None
    assert config.cluster.address is None
