"""RayServices before KubeRay's own definition, where it is given.

``KUBERAY_CRD`` names the file ``ray.io_rayservices.yaml`` of a release of KubeRay, which is not in
this repository: :mod:`.ray_schemas` has those of its fields that the chart writes.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.kubernetes.chart import FOLDERS, LOADER, Manifest, only, render, values_of

FILE = os.environ.get("KUBERAY_CRD")
MODES = [path.name for path in FOLDERS if path.name.startswith("nodes")]

pytestmark = pytest.mark.skipif(FILE is None, reason="KUBERAY_CRD names no definition of KubeRay's")


def strict(schema: Any) -> Any:
    """Unknown fields are mistakes, as with ``kubectl --validate=strict``."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **{name: strict(each) for name, each in schema.items()}}


@cache
def definition() -> jsonschema.Draft202012Validator:
    # The C parser takes a second for its 20,000 lines, the other one twenty.
    versions = yaml.load(Path(FILE or "").read_text(), Loader=LOADER)["spec"]["versions"]
    (found,) = (each for each in versions if each["name"] == "v1")
    schema = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def service(folder: str) -> Manifest:
    return only(render(values_of(folder)), "RayService")


@pytest.mark.parametrize("folder", MODES)
def test_kuberay_knows_each_field(folder: str) -> None:
    assert [error.message for error in definition().iter_errors(service(folder))] == []


def test_a_field_that_kuberay_does_not_know_is_found() -> None:
    wrong = service(MODES[0])
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containres"] = []
    assert list(definition().iter_errors(wrong))
