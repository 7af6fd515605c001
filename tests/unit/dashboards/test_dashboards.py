"""Dashboards are those of the table, and ask for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as grafana

from dashboards.__main__ import write
from dashboards.panels import COLUMNS, Dashboard, Panel, Query
from dashboards.table import DASHBOARDS
from tests.unit.dashboards.catalog import ROOT, catalog, filled, groups, problems

FOLDER = ROOT / "dashboards"
NAMES = [each.name for each in DASHBOARDS]


@pytest.fixture(params=NAMES)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{request.param}.json").read_text()))


def test_the_files_are_those_that_the_table_makes(tmp_path: Path) -> None:
    write(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert kept.keys() == made.keys()
    assert [name for name in kept if kept[name] != made[name]] == [], "run make dashboards"


def left_out(given: Any, understood: Any, at: str = "") -> Iterator[str]:
    """Places of what Grafana's types do not know, or take for something else."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for name, value in given.items():
            yield from left_out(value, understood.get(name), f"{at}.{name}")
    elif isinstance(given, list) and isinstance(understood, list):
        for value, other in zip_longest(given, understood):
            yield from left_out(value, other, f"{at}[]")
    elif given != understood:
        yield f"{at}: {given!r}, which is read as {understood!r}"


def as_grafana_reads(of: dict[str, Any]) -> dict[str, Any]:
    register_default_plugins()
    return dict(json.loads(JSONEncoder().encode(grafana.Dashboard.from_json(of))))


def test_each_field_is_one_of_grafanas_own_types(dashboard: dict[str, Any]) -> None:
    assert list(left_out(dashboard, as_grafana_reads(dashboard))) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [("titel", "x"), ("gridPos", {"x": 0, "y": 0, "w": 1, "h": 1, "z": 1})],
)
def test_a_field_that_grafana_does_not_have_is_found(
    dashboard: dict[str, Any], place: str, value: Any
) -> None:
    dashboard["panels"][0][place] = value
    assert list(left_out(dashboard, as_grafana_reads(dashboard)))


def test_dashboards_are_told_apart() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len({each.title for each in DASHBOARDS}) == len(NAMES)


def test_every_expression_asks_for_series_and_labels_that_there_are(
    dashboard: dict[str, Any],
) -> None:
    known = catalog()
    found = {
        target["expr"]: wrong
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if (wrong := problems(filled(target["expr"]), known))
    }
    assert found == {}


def test_every_line_is_named_by_what_tells_it_apart(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == groups(filled(target["expr"])) - {"le"}, target


def test_what_has_the_chosen_label_is_asked_for_the_chosen(dashboard: dict[str, Any]) -> None:
    choices = [each["name"] for each in dashboard["templating"]["list"][1:]]
    known = catalog()
    for choice in choices:
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                asked = re.findall(r"((?:loomserve_|vllm:)\w+)({[^}]*})?", target["expr"])
                for series, matchers in asked:
                    chosen = f'{choice}=~"${choice}"' in matchers
                    assert chosen == (choice in known[series]) or _beside(series), target


def _beside(series: str) -> bool:
    """Whether all of it stands on a page where single models or devices are chosen."""
    return series.startswith("loomserve_scaling_decisions")


def test_panels_ask_and_say_what_to_do_and_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"].endswith("?")
        assert panel["description"].endswith(".")
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
    for variable in dashboard["templating"]["list"][1:]:
        (asked,) = re.findall(r"label_values\(([\w:]+), (\w+)\)", variable["query"])
        assert asked[1] in catalog()[asked[0]]


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("sum by (model) (loomserve_gateway_queue)", []),
        ("sum by (reason) (loomserve_gateway_queue)", ["cannot be grouped by reason"]),
        ('loomserve_gateway_queue{tier="ssd"}', ["has no label tier"]),
        ("rate(loomserve_gateway_queues[5m])", ["no series loomserve_gateway_queues"]),
        ("1 - sum by (tier) (rate(loomserve_kv_up[1m])) / 2", ["cannot be grouped by tier"]),
        ("loomserve_request_duration_seconds", ["no series"]),
        ("sum(loomserve_request_duration_seconds_bucket)", []),
    ],
)
def test_wrong_expressions_are_found(expression: str, wrong: list[str]) -> None:
    found = problems(expression, catalog())
    assert len(found) == len(wrong)
    assert all(part in said for part, said in zip(wrong, found, strict=True))


def test_what_is_no_promql_is_an_error() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        problems("sum(rate(x[5m])", catalog())


def test_a_row_is_as_high_as_its_highest_panel() -> None:
    def panel(name: str, wide: int, high: int) -> Panel:
        return Panel(f"{name}?", "Look.", (Query("up"),), wide=wide, high=high)

    page = Dashboard("x", "x", (panel("a", 4, 4), panel("b", 12, 8), panel("c", 12, 8)))
    places = [each["gridPos"] for each in page.json()["panels"]]
    assert [(each["x"], each["y"]) for each in places] == [(0, 0), (4, 0), (0, 8)]
