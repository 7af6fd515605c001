"""A port for operators, which the chart shows to those alone that are named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.kubernetes.chart import Manifest, merged, only, pods, render, values_of

SERVE, ADMIN = 8000, 8001
CLIENTS = [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
ADMINS = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
WITH_PORT = ("node-gpu", "nodes-gpu")
WITHOUT = ("node-cpu", "nodes-cpu")


def _made(folder: str, **policy: Any) -> list[Manifest]:
    return render(merged(values_of(folder), {"networkPolicy": policy}))


def _peers(made: list[Manifest], port: str) -> list[Any]:
    """Those of each rule that lets somebody in at a port; None: everybody."""
    rules = only(made, "NetworkPolicy")["spec"]["ingress"]
    return [
        rule.get("from")
        for rule in rules
        if {"protocol": "TCP", "port": port} in rule.get("ports", ())
    ]


@pytest.mark.parametrize("folder", WITH_PORT)
def test_all_pods_have_it(folder: str) -> None:
    for pod in pods(_made(folder)).values():
        (container,) = pod["spec"]["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert (ports["serve"], ports["admin"]) == (SERVE, ADMIN)


@pytest.mark.parametrize("folder", WITH_PORT)
def test_only_those_who_are_named_reach_it(folder: str) -> None:
    prometheus = values_of(folder)["networkPolicy"]["monitoring"]
    made = _made(folder, clients=CLIENTS, admins=ADMINS)
    assert _peers(made, "admin") == [prometheus + ADMINS]
    assert _peers(made, "serve") == [CLIENTS]
    open_to_clients = _made(folder, clients=[], admins=[])
    assert _peers(open_to_clients, "serve") == [None]
    assert _peers(open_to_clients, "admin") == [prometheus]


@pytest.mark.parametrize("folder", WITH_PORT)
def test_nobody_reaches_it_where_nobody_is_named(folder: str) -> None:
    values = merged(
        values_of(folder),
        {"monitoring": {"enabled": False}, "networkPolicy": {"monitoring": [], "admins": []}},
    )
    assert _peers(render(values), "admin") == []


@pytest.mark.parametrize("folder", WITHOUT)
def test_without_it_operators_come_by_the_port_of_clients(folder: str) -> None:
    made = _made(folder, clients=CLIENTS, admins=ADMINS)
    assert _peers(made, "serve") == [CLIENTS + ADMINS]
    assert _peers(made, "admin") == []
    for pod in pods(made).values():
        (container,) = pod["spec"]["containers"]
        assert "admin" not in {one["name"] for one in container["ports"]}


def test_its_service_is_of_the_cluster_alone() -> None:
    outside = {"service": {"type": "LoadBalancer"}}
    made = render(merged(values_of("node-gpu"), outside))
    spec = only(made, "Service", "loom-admin")["spec"]
    assert spec["type"] == "ClusterIP"
    assert spec["ports"] == [{"name": "admin", "port": ADMIN, "targetPort": "admin"}]
    (clients,) = only(made, "Service")["spec"]["ports"]
    assert clients["port"] == SERVE
    names = {each["metadata"]["name"] for each in _made("node-cpu") if each["kind"] == "Service"}
    assert "loom-admin" not in names
