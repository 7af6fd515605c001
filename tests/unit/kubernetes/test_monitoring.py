"""What Prometheus and Grafana get of the chart is what ``dashboards/`` has."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.__main__ import FOLDER, write_for_chart
from loomserve.platform.config.loader import parse
from tests.unit.kubernetes.chart import CHART, Manifest, merged, only, pods, render, values_of

# One process renders the chart, and reads Kubernetes' schemas.
pytestmark = pytest.mark.xdist_group("chart")

ALERTS = FOLDER / "alerts.yaml"
WATCHED: dict[str, Any] = {"monitoring": {"enabled": True, "rules": {"enabled": True}}}
MODES = ("node-cpu", "nodes-gpu")
MOST_BYTES = 2**20
"""Of a ConfigMap, and of the Secret in which Helm keeps a release."""


def _contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "environment.yaml"
    }


def _watched(folder: str) -> list[Manifest]:
    return render(merged(values_of(folder), WATCHED))


def test_the_charts_files_are_those_of_the_dashboards(tmp_path: Path) -> None:
    write_for_chart(tmp_path)
    made, kept = _contents(tmp_path), _contents(CHART / "files")
    assert kept.keys() == made.keys(), "run make dashboards"
    assert [name for name in kept if kept[name] != made[name]] == [], "run make dashboards"


def test_writing_anew_leaves_no_dashboard_that_is_gone(tmp_path: Path) -> None:
    write_for_chart(tmp_path)
    (tmp_path / "dashboards/gone.json").write_text("{}")
    write_for_chart(tmp_path)
    assert not (tmp_path / "dashboards/gone.json").exists()


@pytest.mark.parametrize("folder", MODES)
def test_prometheus_gets_all_alerts_as_they_are(folder: str, tmp_path: Path) -> None:
    spec = only(_watched(folder), "PrometheusRule")["spec"]
    assert spec == yaml.safe_load(ALERTS.read_text())
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here (Debian: apt install prometheus)")
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    subprocess.run([promtool, "check", "rules", str(file)], check=True, capture_output=True)


@pytest.mark.parametrize("folder", MODES)
def test_grafana_gets_all_dashboards_as_they_are(folder: str) -> None:
    made = only(render(values_of(folder)), "ConfigMap", "loom-dashboards")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = {name: json.loads(text) for name, text in made["data"].items()}
    kept = {
        f"loomserve-{path.name}": json.loads(path.read_text()) for path in FOLDER.glob("*.json")
    }
    assert shown == kept
    assert len(json.dumps(made)) < MOST_BYTES / 4, "there is room for more"


@pytest.mark.parametrize("folder", MODES)
def test_prometheus_scrapes_one_gateway_as_the_job_that_alerts_ask_for(folder: str) -> None:
    made = _watched(folder)
    spec = only(made, "PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {
        "name": "loom-tokens",
        "key": "metrics-token",
    }
    of_kuberay = {"ray.io/node-type": "head"} if folder == "nodes-gpu" else {}
    (pod,) = [
        pod for name, pod in pods(made).items() if name == ("head" if of_kuberay else "local")
    ]
    labels = pod["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == {**labels, **of_kuberay}
    assert f'up{{job="{labels[spec["jobLabel"]]}"}}' in ALERTS.read_text()
    ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    server = parse(values_of(folder)["config"]).server
    assert ports[endpoint["port"]] == server.operators_port


def test_kinds_that_a_cluster_may_not_have_are_asked_for() -> None:
    kinds = {made["kind"] for made in render(values_of("node-cpu"))}
    assert "ConfigMap" in kinds
    assert not kinds & {"PodMonitor", "PrometheusRule"}
    rules = merged(values_of("node-cpu"), {"monitoring": {"rules": {"enabled": True}}})
    assert "PodMonitor" not in {made["kind"] for made in render(rules)}
