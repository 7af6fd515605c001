"""All dashboards, read from ``pages/``, in the order in which an operator comes to need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dashboards.panels import Choice, Dashboard, Panel, Query, number

_PAGES = Path(__file__).parent / "pages"
_ORDER = (
    "overview",
    "model",
    "devices",
    "kvstore",
    "batch",
    "tenants",
    "scheduling",
    "lending",
    "rebalancing",
)


def _panel(given: Mapping[str, Any]) -> Panel:
    fields = dict(given)
    if "number" in fields:
        return number(query=fields.pop("number"), **fields)
    return Panel(queries=tuple(Query(**line) for line in fields.pop("lines")), **fields)


def _read(name: str) -> Dashboard:
    page = yaml.safe_load((_PAGES / f"{name}.yaml").read_text())
    choice = Choice(**page["choice"]) if "choice" in page else None
    return Dashboard(name, page["title"], tuple(map(_panel, page["panels"])), choice)


DASHBOARDS = tuple(map(_read, _ORDER))
