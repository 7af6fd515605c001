"""Alerts ask for what there is, lead to a runbook each, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.dashboards.catalog import ROOT, catalog, problems

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("alerts")

FILE = ROOT / "dashboards/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks.md"
CASES = Path(__file__).with_name("alerts_test.yaml")
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in ALERTS]
SEVERITIES = {"page", "ticket", "info"}


def test_alerts_are_told_apart_and_are_the_platforms() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(name.startswith("Loomserve") for name in NAMES), "the overview counts them so"


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_asks_for_series_and_labels_that_there_are(rule: dict[str, Any]) -> None:
    assert problems(rule["expr"], catalog()) == []


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(
    rule: dict[str, Any],
) -> None:
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in SEVERITIES
    told = rule["annotations"]
    assert told["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    assert told["summary"]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert headings == NAMES


def test_each_runbook_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    _, *entries = RUNBOOKS.read_text().split("\n## ")
    for entry in entries:
        said = re.findall(r"^\*\*(.+?):\*\*", entry, re.MULTILINE)
        assert said == ["Means", "Look at", "Do"], entry.splitlines()[0]


def test_the_cases_have_each_alert_fire() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {
        each["alertname"]
        for case in cases
        for each in case.get("alert_rule_test", ())
        if each.get("exp_alerts")
    }
    assert fired == set(NAMES)


def test_alerts_fire_in_their_cases_and_stay_quiet_beside_them(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here (Debian: apt install prometheus)")
    for file in (FILE, CASES):
        shutil.copy(file, tmp_path)
    for command in (["check", "rules", FILE.name], ["test", "rules", CASES.name]):
        done = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
