"""What a file may say more shortly: ``auto`` where the platform chooses, and models by their names.

It is read before pydantic sees it, whose strict mode takes lists for tuples in JSON only.
"""

from __future__ import annotations

from typing import Any

from loomserve.platform.config.base import AUTO, FieldError


def in_full(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration as its sections have it; what is wrong in other ways stays as it is. Raises
    FieldError if a short form is wrong."""
    full = _placed(given, "devices")
    models = full.get("models")
    if isinstance(models, dict):
        models = [_named(name, fields) for name, fields in models.items()]
    if isinstance(models, list):
        full["models"] = [
            _model(each, index) if isinstance(each, dict) else each
            for index, each in enumerate(models)
        ]
    return full


def _model(given: dict[str, Any], index: int) -> dict[str, Any]:
    model = _placed(given, "models", index, "devices")
    if model.get("lending") == AUTO:
        model["lending"] = {"auto": True}
    return model


def _placed(given: dict[str, Any], *field: str | int) -> dict[str, Any]:
    """Without ``devices`` that the platform chooses."""
    devices = given.get("devices")
    if devices == []:
        raise FieldError("is empty: name one at least, or write auto", *field)
    return {name: value for name, value in given.items() if name != "devices" or value != AUTO}


def _named(name: str, fields: Any) -> dict[str, Any]:
    """A model of a mapping of names."""
    if isinstance(fields, str):
        return {"name": name, "source": fields}
    if not isinstance(fields, dict):
        raise FieldError("write its source, such as demo, or a mapping", "models", name)
    if "name" in fields:
        raise FieldError(f"{name!r} stands before it already: leave it out", "models", name, "name")
    return {"name": name, **fields}
