"""Renders the chart by Helm's own engine, without a cluster."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

# What is not tested there is tested nowhere.
if find_spec("helm_python") is None and not os.environ.get("CI"):
    pytest.skip(
        "Helm's own engine renders the chart: make install installs it", allow_module_level=True
    )

ROOT = Path(__file__).parents[3]
CHART = ROOT / "k8s/chart"
FOLDERS = sorted(path for path in (ROOT / "k8s/values").iterdir() if path.is_dir())
RELEASE, NAMESPACE = "loom", "models"
# The chart's dashboards are long, and libyaml reads and writes them ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

Manifest = dict[str, Any]


def helm() -> Any:
    """Helm's engine, which hangs in a process forked from one that has loaded it: Go's does."""
    return import_module("helm_python")


@cache
def _chart() -> Any:
    return helm().Chart.load(CHART)


def values_of(folder: str) -> dict[str, Any]:
    """As ``helm -f derived.yaml -f site.yaml`` has them."""
    path = ROOT / "k8s/values" / folder
    values: dict[str, Any] = {}
    for name in ("derived.yaml", "site.yaml"):
        values = merged(values, yaml.safe_load((path / name).read_text()))
    return values


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(below)
    for key, value in above.items():
        there = made.get(key)
        both = isinstance(value, dict) and isinstance(there, dict)
        made[key] = merged(there, value) if both else value
    return made


def render(values: dict[str, Any], release: str = RELEASE) -> list[Manifest]:
    """
    Raises:
        HelmError: the chart refuses the values.
    """
    texts = _chart().render(values, name=release, namespace=NAMESPACE)
    return [made for name, text in sorted(texts.items()) for made in _manifests(name, text)]


def _manifests(name: str, text: str) -> Iterator[Manifest]:
    if name.endswith(".yaml"):
        yield from filter(None, yaml.load_all(text, Loader=LOADER))


def only(manifests: list[Manifest], kind: str, name: str = RELEASE) -> Manifest:
    (found,) = [
        each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The templates of pods, by the pods' names in the configuration."""
    found: dict[str, Manifest] = {}
    for manifest in manifests:
        if manifest["kind"] == "StatefulSet":
            found["local"] = manifest["spec"]["template"]
        if manifest["kind"] == "RayService":
            cluster = manifest["spec"]["rayClusterConfig"]
            found["head"] = cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                found[group["groupName"]] = group["template"]
    return found


def environment(pod: Manifest) -> dict[str, Any]:
    """What the pod's container has: values, or where they come from."""
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
