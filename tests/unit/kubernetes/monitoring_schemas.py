"""What the chart may write of the Prometheus operator's kinds, strictly.

The fields, their types and patterns are those that its definitions (``monitoring.coreos.com/v1``)
had on 2026-08-08, commit ``6adcebc5076c``: all of PrometheusRule, and of PodMonitor those that the
chart has a use for.
"""

from __future__ import annotations

from tests.unit.kubernetes.schema_parts import TEXT, TEXTS, Schema, list_of, of

_DURATION: Schema = {
    "type": "string",
    "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?"
    "(([0-9]+)ms)?)$",
}


def _manifest(spec: Schema) -> Schema:
    fields = {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": TEXT, "spec": spec}
    return of({**fields, "metadata": {"type": "object"}}, *fields)


_RULE = of(
    {
        "alert": TEXT,
        "annotations": TEXTS,
        "expr": {"type": ["string", "integer"]},
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": TEXTS,
        "record": TEXT,
    },
    "expr",
)
_GROUP = of(
    {
        "interval": _DURATION,
        "labels": TEXTS,
        "limit": {"type": "integer"},
        "name": {"type": "string", "minLength": 1},
        "partial_response_strategy": TEXT,
        "query_offset": _DURATION,
        "rules": list_of(_RULE),
    },
    "name",
)
_SECRET_KEY = of({"key": TEXT, "name": TEXT, "optional": {"type": "boolean"}}, "key")
_ENDPOINT = of(
    {
        "authorization": of({"type": TEXT, "credentials": _SECRET_KEY}),
        "interval": _DURATION,
        "path": TEXT,
        "port": TEXT,
        "scheme": {"enum": ["http", "https"]},
        "scrapeTimeout": _DURATION,
    }
)
_MONITOR = of(
    {
        "jobLabel": TEXT,
        "podMetricsEndpoints": list_of(_ENDPOINT),
        "selector": of({"matchLabels": TEXTS}),
    },
    "selector",
)

MONITORING: dict[str, Schema] = {
    "PodMonitor": _manifest(_MONITOR),
    "PrometheusRule": _manifest(of({"groups": list_of(_GROUP)})),
}
"""By kind."""
