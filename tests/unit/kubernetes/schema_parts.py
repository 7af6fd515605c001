"""Parts of JSON schemas in which a field that is not there is an error."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer"}


def of(fields: Schema, *required: str) -> Schema:
    """An object of these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}
