"""What a dashboard is made of, and the JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

COLUMNS = 24
MODEL = '{model=~"$model"}'
"""Matches the models that are chosen in a dashboard's list."""
DEVICE = '{device=~"$device"}'
KEY = '{key=~"$key"}'
RATE = "[$__rate_interval]"
"""The shortest span of which Prometheus has enough samples, as Grafana works it out."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA = 39


@dataclass(frozen=True)
class Query:
    """An expression of PromQL, and the name of each of its lines, with ``{{label}}``."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One question, answered by lines over time, or by the numbers of now.

    Attributes:
        question: the title.
        todo: what the answer means, and what to do about it.
        queries: whose answers are drawn together.
        unit: Grafana's name of the unit, such as ``s``, ``bytes``, ``percentunit``.
        kind: lines over time, or numbers.
        wide: in columns, of which there are 24.
        high: in rows of Grafana's grid.
        least: where the axis begins; None: where the lines do.
    """

    question: str
    todo: str
    queries: Sequence[Query]
    unit: str = "none"
    kind: Literal["timeseries", "stat"] = "timeseries"
    wide: int = 12
    high: int = 8
    least: float | None = 0

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """As Grafana has it.

        Args:
            number: its id in the dashboard, from 1.
            x: column of its left edge.
            y: row of its upper edge.
        """
        defaults: dict[str, Any] = {"unit": self.unit}
        if self.least is not None:
            defaults["min"] = self.least
        targets: list[dict[str, Any]] = [
            {"refId": letter, "expr": query.expr, "legendFormat": query.legend}
            for letter, query in zip(ascii_uppercase, self.queries, strict=False)
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.question,
            "description": self.todo,
            "datasource": _DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.wide, "h": self.high},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": targets,
        }


def number(question: str, todo: str, query: str, unit: str = "none") -> Panel:
    """A panel that is one number, of six side by side."""
    return Panel(question, todo, (Query(query),), unit, kind="stat", wide=4, high=4, least=None)


@dataclass(frozen=True)
class Choice:
    """A list on top of a dashboard, of the values that a label of a metric has."""

    label: str
    metric: str

    def json(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": f"label_values({self.metric}, {self.label})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        }


@dataclass(frozen=True)
class Dashboard:
    """A page of panels, laid out in rows in their order."""

    name: str
    """Of its file, and in its URL."""
    title: str
    panels: Sequence[Panel]
    choice: Choice | None = None

    def json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        choices: list[dict[str, Any]] = [
            {
                "name": "datasource",
                "label": "Prometheus",
                "type": "datasource",
                "query": "prometheus",
            }
        ]
        if self.choice is not None:
            choices.append(self.choice.json())
        return {
            "uid": f"loomserve-{self.name}",
            "title": f"Loomserve: {self.title}",
            "tags": ["loomserve"],
            "schemaVersion": _SCHEMA,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "links": [
                {
                    "title": "Loomserve",
                    "type": "dashboards",
                    "tags": ["loomserve"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {"list": choices},
            "panels": [
                panel.json(at, x, y) for at, (panel, x, y) in enumerate(placed(self.panels), 1)
            ],
        }

    def text(self) -> str:
        """Its file."""
        return json.dumps(self.json(), indent=1) + "\n"


def placed(panels: Sequence[Panel]) -> Iterator[tuple[Panel, int, int]]:
    """Panels with the column and row of their upper left corners."""
    x = y = row = 0
    for panel in panels:
        if x + panel.wide > COLUMNS:
            x, y, row = 0, y + row, 0
        yield panel, x, y
        x, row = x + panel.wide, max(row, panel.high)


def ratio(part: str, whole: str) -> str:
    """One expression over another."""
    return f"{part} / {whole}"


def total(metric: str, by: str = "", where: str = "") -> str:
    """What a counter grows by a second, summed over all but the labels ``by``."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{where}{RATE}))"


def quantiles(histogram: str, by: str, where: str = "") -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram, each by one label or by none."""
    groups, shown = (f"{by}, le", f"{{{{{by}}}}} ") if by else ("le", "")
    buckets = total(f"{histogram}_bucket", groups, where)
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"{shown}{name}")
        for share, name in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
    )


def mean(histogram: str, by: str, where: str = "") -> str:
    """The mean of what a histogram has seen in the rate's span."""
    return ratio(total(f"{histogram}_sum", by, where), total(f"{histogram}_count", by, where))
