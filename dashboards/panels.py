"""What a dashboard is made of, and the JSON that Grafana imports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

COLUMNS = 24
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
        todo: what the answer means, and what to do about it.
        unit: Grafana's name of the unit, such as ``s``, ``bytes``, ``percentunit``.
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
        """As Grafana has it: ``number`` is its id from 1, ``x`` and ``y`` its upper left corner."""
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
        return json.dumps(self.json(), indent=1) + "\n"


def placed(panels: Sequence[Panel]) -> Iterator[tuple[Panel, int, int]]:
    """Panels with the column and row of their upper left corners."""
    x = y = row = 0
    for panel in panels:
        if x + panel.wide > COLUMNS:
            x, y, row = 0, y + row, 0
        yield panel, x, y
        x, row = x + panel.wide, max(row, panel.high)
