"""Dashboards' questions and alerts' rules, put to a real Prometheus that scrapes the platform."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dashboards.panels import Panel
from dashboards.table import DASHBOARDS
from tests.e2e.conftest import COLD, HOT, OFFLINE, Platform
from tests.e2e.prometheus import SCRAPE_S, Prometheus, answers, picture, scraping
from tests.e2e.test_batch import ended, line, submit
from tests.e2e.test_kvstore import new_prompt
from tests.unit.dashboards.catalog import ROOT
from tests.unit.dashboards.test_alerts import ALERTS

pytestmark = pytest.mark.e2e

ROUNDS = 3
PANELS = [(page.name, panel) for page in DASHBOARDS for panel in page.panels]

_NO_LENDING = "lending is off here"
ONE_NODE = "there is one node"
_NO_PROFILE = "nobody has profiled these devices"
NEVER = {
    ("devices", "How much compute is each device asked for?"): _NO_PROFILE,
    ("devices", "How much of its memory is in use?"): _NO_PROFILE,
    ("devices", "How much of its time does it compute for other engines?"): _NO_LENDING,
    ("devices", "How much of its time does it wait for lenders?"): _NO_LENDING,
    ("devices", "Where are prompts of decode replicas computed?"): "no replica has a role",
    ("kvstore", "How much do nodes fetch from each other?"): ONE_NODE,
    ("kvstore", "Which fetches bring nothing?"): ONE_NODE,
    ("kvstore", "How fast are the links between nodes?"): ONE_NODE,
    ("kvstore", "Do all nodes know each other's stores?"): ONE_NODE,
    ("lending", "How many KV blocks are borrowed?"): _NO_LENDING,
    ("lending", "How many requests are with which lender?"): _NO_LENDING,
    ("lending", "How long does a borrower wait for a layer?"): _NO_LENDING,
    ("lending", "What was the longest wait for a layer?"): _NO_LENDING,
    ("lending", "Which share of time does each borrower wait?"): _NO_LENDING,
    ("lending", "Which share of time do lenders compute for borrowers?"): _NO_LENDING,
    ("lending", "How many KV blocks are lent?"): _NO_LENDING,
    ("lending", "Why do loans break?"): _NO_LENDING,
    ("model", "How far off are predicted lengths?"): "no model has lengths",
    ("model", "How many replicas does its load ask for?"): "their numbers are set",
    ("rebalancing", "How much more is asked of one device than of another?"): _NO_PROFILE,
    ("rebalancing", "How much compute is asked for?"): _NO_PROFILE,
    ("rebalancing", "How much memory is in use?"): _NO_PROFILE,
}
"""Panels that have no answer here, and must have none; others ask them of platforms that have one
(``test_dashboards_of_features.py``, ``cluster/test_kv_of_two_nodes.py``)."""
_GOOD = "empty is good"
SOMETIMES = {
    ("overview", "Which requests had to go on elsewhere?"): _GOOD,
    ("overview", "Which requests were lost?"): _GOOD,
    ("model", "How long do requests wait for a model that is not ready?"): "all are ready",
    ("model", "Which models stand in for aliases?"): "another test makes aliases",
    ("model", "Which adapters are asked for?"): "another test loads adapters",
    ("rebalancing", "Which actions were taken?"): "another test has plans made",
    ("rebalancing", "How much do actions move?"): "another test has plans made",
    ("rebalancing", "Why are candidates not taken?"): "another test has plans made",
    ("rebalancing", "Why are replicas started and stopped?"): "their numbers are set",
    ("scheduling", "Is the cost of swapping known?"): "only while requests are preempted",
}
"""Panels that have an answer if other tests have brought something about on this platform."""


def _ask(platform: Platform, prompt: str) -> None:
    """What clients do, good and bad, of all that dashboards ask about."""
    with platform.http() as http:
        http.headers["x-slo-ms"] = "60000"
        for model in (HOT, COLD):
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": True}
            http.post("/v1/completions", json=body).raise_for_status()
        assert http.post("/v1/completions", json={"model": "nobody"}).status_code == 404
    with platform.http("lsk-wrong") as http:
        assert http.get("/v1/models").status_code == 401
    with platform.http(platform.limited_key) as http:
        answered = {http.get("/v1/models").status_code for _ in range(4)}
    assert 429 in answered


@pytest.fixture(scope="module")
def span(
    platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, float, float]]:
    """Prometheus, and from when to when it watched the platform at work."""
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(platform, folder, ROOT / "dashboards/alerts.yaml") as prometheus:
        begin, client = time.time(), platform.client()
        for number in range(ROUNDS):
            # Of which the KV store is asked for the first time.
            prompt = new_prompt()
            batches = [
                submit(
                    client, [line(f"{number}-{model}", "/v1/completions", model)], "/v1/completions"
                )
                for model in (HOT, OFFLINE)
            ]
            asking = [threading.Thread(target=_ask, args=(platform, prompt)) for _ in range(2)]
            for each in asking:
                each.start()
            for each in asking:
                each.join()
            for batch in batches:
                assert ended(client, batch, 120).status == "completed"
            time.sleep(2 * SCRAPE_S)
        picture(prometheus, begin, "batch", "kvstore", "model", "overview", "scheduling", "tenants")
        yield prometheus, begin, time.time()


@pytest.mark.parametrize(
    ("page", "panel"), PANELS, ids=[f"{page}: {panel.question}" for page, panel in PANELS]
)
def test_a_panels_question_has_an_answer(
    span: tuple[Prometheus, float, float], page: str, panel: Panel
) -> None:
    prometheus, begin, end = span
    place = page, panel.question
    for query in panel.queries:
        found = answers(prometheus, query, begin, end)
        if place in NEVER:
            assert not found, f"{query.expr} has an answer, although {NEVER[place]}"
        elif place not in SOMETIMES:
            assert found, query.expr


def test_the_exceptions_are_panels() -> None:
    places = {(page, panel.question) for page, panel in PANELS}
    assert NEVER.keys() | SOMETIMES.keys() <= places
    assert not NEVER.keys() & SOMETIMES.keys()


def test_alerts_are_in_use_and_none_fires_on_a_platform_that_is_well(
    span: tuple[Prometheus, float, float],
) -> None:
    rules = span[0].rules()
    assert len(rules) == len(ALERTS)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
