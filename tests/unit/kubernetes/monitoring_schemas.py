"""What the chart may write of the Prometheus operator's kinds, strictly.

The fields, their types and patterns are those that its definitions (``monitoring.coreos.com/v1``)
had on 2026-08-08, commit ``6adcebc5076c``: all of PrometheusRule, and of PodMonitor those that the
chart has a use for.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Schema = {
    "type": "string",
    "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?"
    "(([0-9]+)ms)?)$",
}


def _of(fields: Schema, *required: str) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _manifest(spec: Schema) -> Schema:
    fields = {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": _TEXT, "spec": spec}
    return _of({**fields, "metadata": {"type": "object"}}, *fields)


_RULE = _of(
    {
        "alert": _TEXT,
        "annotations": _TEXTS,
        "expr": {"type": ["string", "integer"]},
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": _TEXTS,
        "record": _TEXT,
    },
    "expr",
)
_GROUP = _of(
    {
        "interval": _DURATION,
        "labels": _TEXTS,
        "limit": {"type": "integer"},
        "name": {"type": "string", "minLength": 1},
        "partial_response_strategy": _TEXT,
        "query_offset": _DURATION,
        "rules": _list(_RULE),
    },
    "name",
)
_SECRET_KEY = _of({"key": _TEXT, "name": _TEXT, "optional": {"type": "boolean"}}, "key")
_ENDPOINT = _of(
    {
        "authorization": _of({"type": _TEXT, "credentials": _SECRET_KEY}),
        "interval": _DURATION,
        "path": _TEXT,
        "port": _TEXT,
        "scheme": {"enum": ["http", "https"]},
        "scrapeTimeout": _DURATION,
    }
)
_MONITOR = _of(
    {
        "jobLabel": _TEXT,
        "podMetricsEndpoints": _list(_ENDPOINT),
        "selector": _of({"matchLabels": _TEXTS}),
    },
    "selector",
)

MONITORING: dict[str, Schema] = {
    "PodMonitor": _manifest(_MONITOR),
    "PrometheusRule": _manifest(_of({"groups": _list(_GROUP)})),
}
"""By kind."""
