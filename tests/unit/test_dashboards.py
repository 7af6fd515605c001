"""Dashboards ask for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
COLUMNS = 24


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads(request.param.read_text()))


def catalog() -> dict[str, set[str]]:
    """Series name to label names: those of a histogram have suffixes."""
    page = (ROOT / "docs/metrics.md").read_text()
    series: dict[str, set[str]] = {}
    for name, labels, meaning in re.findall(
        r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE
    ):
        own = set(re.findall(r"`(\w+)`", labels))
        if meaning.startswith("Histogram"):
            series |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
        else:
            series[name] = own
    return series


def test_there_is_a_dashboard() -> None:
    assert DASHBOARDS


def test_every_panel_asks_for_series_and_labels_that_there_are(dashboard: dict[str, Any]) -> None:
    known = catalog()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            grouped = {
                label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")
            }
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == grouped - {"le"}, query
            asked = re.findall(r"(loomserve_\w+){([^}]*)}", query)
            assert len(asked) == query.count("loomserve_"), query
            for series, matchers in asked:
                assert series in known, query
                matched = set(re.findall(r"(\w+)=", matchers))
                # What has no model, as devices have none, is not asked for one.
                assert "model" in matched or "model" not in known[series], query
                assert matched | grouped <= known[series], query


def test_panels_are_told_apart_explained_and_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        grid = panel["gridPos"]
        own = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in own) < COLUMNS
        assert not own & places, panel["title"]
        places |= own


def test_what_a_panel_refers_to_is_a_variable_of_the_dashboard(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard["panels"])))
    assert used == variables
