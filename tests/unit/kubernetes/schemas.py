"""Checks manifests as a strict API server would: no field but those that there are."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import kubernetes_validate

from tests.unit.kubernetes.chart import Manifest
from tests.unit.kubernetes.monitoring_schemas import MONITORING
from tests.unit.kubernetes.ray_schemas import RAY_SERVICE, pod_templates
from tests.unit.kubernetes.schema_parts import Schema

NEWEST, OLDEST = "1.37", "1.30"
# What the tests have no schema of; their shape is asserted by hand.
OTHERS = {"HTTPRoute"}


def problems(manifest: Manifest, version: str = NEWEST) -> list[str]:
    """What is wrong with it, a line each."""
    if manifest["kind"] in OTHERS:
        return []
    if manifest["kind"] == "RayService":
        return _problems_by(RAY_SERVICE, manifest) or [
            f"{place}: {problem}"
            for place, template in pod_templates(manifest).items()
            for problem in _problems_of_kubernetes(_pod_template(template), version)
        ]
    if manifest["kind"] in MONITORING:
        return _problems_by(MONITORING[manifest["kind"]], manifest)
    return _problems_of_kubernetes(manifest, version)


def _pod_template(template: Manifest) -> Manifest:
    """As a manifest of its own, which Kubernetes knows."""
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}


def _problems_of_kubernetes(manifest: Manifest, version: str) -> list[str]:
    # Most cases render most manifests alike.
    return _problems_of_text(json.dumps(manifest), version)


@cache
def _problems_of_text(text: str, version: str) -> list[str]:
    manifest = json.loads(text)
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _problems_by(schema: Schema, manifest: Manifest) -> list[str]:
    return [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]
