"""Checks manifests as a strict API server would: no field but those that there are."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.unit.kubernetes.chart import ROOT, Manifest
from tests.unit.kubernetes.monitoring_schemas import MONITORING

NEWEST, OLDEST = "1.37", "1.30"
CRDS = ROOT / "k8s/crds-for-tests"
# What the tests have no schema of; their shape is asserted by hand.
OTHERS = {"HTTPRoute"}


def problems(manifest: Manifest, version: str = NEWEST) -> list[str]:
    """What is wrong with it, a line each."""
    if manifest["kind"] in OTHERS:
        return []
    if manifest["apiVersion"].startswith("ray.io/"):
        schema = _schema(manifest["kind"])
        return _problems_by(schema, _with_defaults(copy.deepcopy(manifest), schema))
    if manifest["kind"] in MONITORING:
        return _problems_by(MONITORING[manifest["kind"]], manifest)
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _problems_by(schema: dict[str, Any], manifest: Manifest) -> list[str]:
    return [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]


@cache
def _schema(kind: str) -> dict[str, Any]:
    text = (CRDS / f"ray.io_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema: dict[str, Any] = _strict(found["schema"]["openAPIV3Schema"])
    # The API server's own, of which the definition says nothing more.
    schema["properties"]["metadata"].pop("additionalProperties", None)
    return schema


def _strict(schema: Any) -> Any:
    """The schema in JSON Schema's words, in which a field that is not there is an error."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if (
        isinstance(made.get("properties"), dict)
        and "additionalProperties" not in made
        and not made.get("x-kubernetes-preserve-unknown-fields")
    ):
        made["additionalProperties"] = False
    return made


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server has it before it looks: samples of KubeRay's own are wrong without."""
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value[name] = copy.deepcopy(field["default"])
            if name in value:
                value[name] = _with_defaults(value[name], field)
    elif isinstance(value, list):
        items = schema.get("items", {})
        return [_with_defaults(each, items) for each in value]
    return value
