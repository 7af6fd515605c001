"""What the chart must refuse, and mistakes in manifests that the checks must see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.kubernetes.chart import helm, merged, only, render, values_of
from tests.unit.kubernetes.operator_rules import broken_rules
from tests.unit.kubernetes.schemas import problems

# One process renders the chart, and reads Kubernetes' schemas.
pytestmark = pytest.mark.xdist_group("chart")

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no configuration": ("node-cpu", {"config": ""}, "config is missing"),
    "another configuration": ("node-cpu", {"config": "devices: []\n"}, "another configuration"),
    "another mode": ("node-cpu", {"mode": "rayservice"}, "for mode node"),
    "no mode": ("node-cpu", {"mode": "nodes"}, "mode"),
    "no image": ("node-cpu", {"image": {"repository": ""}}, "image.repository"),
    "no tag": ("node-cpu", {"image": {"tag": ""}}, "image.tag"),
    "latest": ("node-cpu", {"image": {"tag": "latest"}}, "tag"),
    "less memory": (
        "nodes-cpu",
        {"resources": {"memory": {"one": "1Gi"}}},
        "resources.memory.one: the configuration takes",
    ),
    "memory of no pod": (
        "nodes-cpu",
        {"resources": {"memory": {"three": "99Gi"}}},
        "there is no such pod",
    ),
    "one state for two heads": (
        "nodes-cpu",
        {"upgrade": {"strategy": "NewCluster"}},
        "ReadWriteMany",
    ),
    "a strategy that is not there": (
        "nodes-cpu",
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
        "strategy",
    ),
    "a misspelt value": ("node-cpu", {"monitorin": {"enabled": True}}, "monitorin"),
    "a misspelt value within": ("node-cpu", {"storage": {"stat": {}}}, "stat"),
    "a label that is no text": (
        "node-cpu",
        {"monitoring": {"dashboards": {"labels": {"grafana_dashboard": 1}}}},
        "grafana_dashboard",
    ),
    "alerts by another name": (
        "node-cpu",
        {"monitoring": {"alerts": {"enabled": True}}},
        "alerts",
    ),
    "a Prometheus that may not ask": (
        "node-gpu",
        {"networkPolicy": {"monitoring": []}},
        "networkPolicy.monitoring is missing",
    ),
    "a route to nowhere": ("node-cpu", {"route": {"enabled": True}}, "route.parentRefs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_chart_refuses(case: str) -> None:
    folder, flags, said = REFUSED[case]
    values = merged(values_of(folder), flags)
    with pytest.raises(helm().HelmError, match=said):
        render(values)


def test_the_chart_refuses_a_name_that_kuberay_would_cut() -> None:
    with pytest.raises(helm().HelmError, match="40 characters"):
        render(values_of("nodes-cpu"), release="l" * 41)


def _head(service: Any) -> Any:
    return service["spec"]["rayClusterConfig"]["headGroupSpec"]


def _container(service: Any) -> Any:
    return _head(service)["template"]["spec"]["containers"][0]


def _group(service: Any) -> Any:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]


AGAINST_THE_SCHEMA: dict[str, Callable[[Any], Any]] = {
    "a misspelt field of a container": lambda s: _container(s).update(imagePulPolicy="Always"),
    "a misspelt field of the service": lambda s: s["spec"].update(serveConfig="x"),
    "a number for text": lambda s: _head(s)["rayStartParams"].update({"num-cpus": 0}),
    "a misspelt mode": lambda s: s["spec"]["rayClusterConfig"].update(authOptions={"mode": "tok"}),
    "no name of a group": lambda s: _group(s).pop("groupName"),
    "a volume of no kind": lambda s: _container(s)["volumeMounts"].append({"name": "x"}),
}
AGAINST_THE_OPERATOR: dict[str, Callable[[Any], Any]] = {
    "a strategy that is not there": lambda s: s["spec"].update(upgradeStrategy={"type": "Rolling"}),
    "incremental without its options": lambda s: s["spec"].update(
        upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}
    ),
    "a group of no size": lambda s: _group(s).pop("minReplicas"),
    "fewer than least": lambda s: _group(s).update(minReplicas=2),
    "resources in two places": lambda s: _group(s).update(resources={"cpu": "1"}),
    "a name of the head's service": lambda s: _head(s).update(
        headService={"metadata": {"name": "head"}}
    ),
    "an old Ray with tokens": lambda s: s["spec"]["rayClusterConfig"].update(rayVersion="2.51.0"),
    "Redis by the way": lambda s: _container(s)["env"].append(
        {"name": "RAY_REDIS_ADDRESS", "value": "r"}
    ),
    "a long name": lambda s: s["metadata"].update(name="l" * 48),
    "labels among parameters": lambda s: _group(s)["rayStartParams"].update(labels="a=b"),
}


@pytest.mark.parametrize("case", AGAINST_THE_SCHEMA)
def test_the_schema_sees(case: str) -> None:
    service = copy.deepcopy(only(render(values_of("nodes-cpu")), "RayService"))
    assert problems(service) == []
    AGAINST_THE_SCHEMA[case](service)
    assert problems(service) != []


@pytest.mark.parametrize("case", AGAINST_THE_OPERATOR)
def test_the_operators_rules_see(case: str) -> None:
    service = copy.deepcopy(only(render(values_of("nodes-cpu")), "RayService"))
    assert broken_rules(service) == []
    AGAINST_THE_OPERATOR[case](service)
    assert broken_rules(service) != []


def _endpoint(spec: Any) -> Any:
    return spec["podMetricsEndpoints"][0]


def _rule(spec: Any) -> Any:
    return spec["groups"][0]["rules"][0]


@pytest.mark.parametrize(
    ("kind", "name", "mistake"),
    [
        ("PodMonitor", "loom", lambda spec: spec.update(selectors={})),
        ("PodMonitor", "loom", lambda spec: spec.pop("selector")),
        ("PodMonitor", "loom", lambda spec: _endpoint(spec).update(ports="serve")),
        ("PodMonitor", "loom", lambda spec: _endpoint(spec).update(interval="15")),
        ("PodMonitor", "loom", lambda spec: _endpoint(spec).update(port=8000)),
        ("PrometheusRule", "loom", lambda spec: _rule(spec).update({"for": "2 minutes"})),
        ("PrometheusRule", "loom", lambda spec: _rule(spec).update(fors="2m")),
        ("PrometheusRule", "loom", lambda spec: _rule(spec).pop("expr")),
        ("PrometheusRule", "loom", lambda spec: _rule(spec)["labels"].update(severity=1)),
        ("PrometheusRule", "loom", lambda spec: spec["groups"][0].pop("name")),
        ("PrometheusRule", "loom", lambda spec: spec.update(rules=[])),
        ("ConfigMap", "loom-dashboards", lambda spec: spec.update({"a.json": 1})),
        ("PodDisruptionBudget", "loom-node", lambda spec: spec.update(minAvailabel=1)),
        ("StatefulSet", "loom", lambda spec: spec.update(replica=2)),
        ("NetworkPolicy", "loom", lambda spec: spec["ingress"].append({"form": []})),
        ("Service", "loom", lambda spec: spec["ports"].append({"port": "http"})),
    ],
)
def test_schemas_see(kind: str, name: str, mistake: Callable[[Any], Any]) -> None:
    watched = {"monitoring": {"enabled": True, "rules": {"enabled": True}}}
    values = merged(values_of("node-cpu"), watched)
    manifest = copy.deepcopy(only(render(values), kind, name))
    assert problems(manifest) == []
    mistake(manifest.get("spec") or manifest["data"])
    assert problems(manifest) != []
