"""The cases of the benchmark of decisions, small."""

from __future__ import annotations

import pytest

from benchmarks.decision_cases import Fleet, decisions, picks, placing, proposing, tells
from benchmarks.decisions import POLICIES, case

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("decisions")


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_those_of_a_fleet_that_reports_and_drains(policy: str) -> None:
    assert len(decisions(100, policy, most=20, most_s=60)) == 20  # type: ignore[arg-type]
    fleet = Fleet(100, policy)  # type: ignore[arg-type]
    for _ in range(500):
        fleet.report_those_due()
        fleet.decide(fleet.request())
    opened = [fleet.ledger.of(id_).requests for id_ in fleet.ids]
    assert sum(opened) == 400
    assert opened[99] == 0, "it drains"
    assert sum(fleet.ledger.decisions().values()) == 500


def test_the_other_cases_give_seconds_and_what_came_out() -> None:
    assert len(picks(10, 5)) == 5
    assert len(tells(10, "prefix_aware", 5)) == 5
    plan = proposing(16, 8, 0.05)
    assert plan["actions"] > 0
    assert proposing(16, 8, 0.05)["digest"] == plan["digest"]
    assert proposing(16, 8, 2.0)["actions"] == 0
    assert placing(16, alike=True)["s"].keys() == {"he", "lr", "balanced"}


def test_a_case_runs_in_a_process_of_its_own() -> None:
    assert case("propose", devices=16, a_node=8, least_gain=0.05)["actions"] > 0
