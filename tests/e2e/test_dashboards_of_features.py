"""Dashboards' questions that the shared platform cannot answer, put to one that has what they ask.

It lends, its devices are profiled, it predicts lengths, starts replicas by load and computes
prompts apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import test_lending
from tests.e2e.conftest import ENGINE, Platform, server_section, started
from tests.e2e.predicted import question, trained
from tests.e2e.prometheus import SCRAPE_S, Prometheus, answers, picture, scraping
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_dashboards import NEVER, ONE_NODE, PANELS
from tests.e2e.test_lending import LENDER, profile_devices, streaming, wait_for_loan
from tests.unit.dashboards.catalog import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

APART, SCALED = "apart", "scaled"
HERE = [
    (page, panel)
    for page, panel in PANELS
    if NEVER.get((page, panel.question), ONE_NODE) != ONE_NODE
]
LONG = "Once upon a time there was a fox. " * 40
"""Longer than what a decode replica computes by itself."""


def configured(predictor: str, port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    def model(name: str, **more: object) -> dict[str, Any]:
        engine = {"name": name, "source": "demo", "devices": ["core0", "core1"], "engine": ENGINE}
        return {**engine, "kv_cache_memory": "128MiB", **more}

    return {
        "devices": [{"name": f"core{core}", "cores": [core]} for core in range(2)],
        "models": [
            test_lending.COLD_MODEL | {"lengths": {"predictor": predictor}},
            test_lending.HOT_MODEL,
            model(APART, replicas=2, roles={"prefill": 1, "decode": 1}),
            model(SCALED, replicas={"min": 1, "max": 2}),
        ],
        "kvstore": {"memory": "256MiB"},
        "rebalancing": {"folder": "plans", "profile": "devices.yaml", "stale_after_s": 30},
        "server": server_section(port, hashes),
    }


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with (
        trained(tmp_path_factory.mktemp("lengths")) as predictor,
        started(
            tmp_path_factory.mktemp("features"),
            lambda port, hashes: configured(predictor, port, hashes),
        ) as running,
    ):
        profile_devices(running)
        yield running


def ask(platform: Platform, model: str, text: str) -> None:
    platform.client().completions.create(model=model, prompt=text, max_tokens=8)


def chat(platform: Platform, model: str, text: str) -> None:
    messages: list[Any] = [{"role": "user", "content": text}]
    platform.client().chat.completions.create(model=model, messages=messages, max_tokens=400)


def lose_the_lender(platform: Platform) -> None:
    """While requests of the borrower are there, whose loan breaks by that."""
    (replica,) = model_state(platform, LENDER)["replicas"]
    with streaming(platform) as streamed:
        psutil.Process(replica["engine_pid"]).kill()
        streamed()
    wait_for(lambda: test_lending.status(platform, LENDER) == "ready", 240)


@pytest.fixture(scope="module")
def span(
    platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, float, float]]:
    """Prometheus, and from when to when it watched the platform at work."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with scraping(platform, folder, ROOT / "dashboards/alerts.yaml") as prometheus:
        begin = time.time()
        wait_for_loan(platform)
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(ask, platform, model, f"{number} {LONG}")
                for number in range(12)
                for model in (APART, SCALED)
            ]
            # Lengths are predicted, and seen where answers end by themselves.
            asked += [pool.submit(chat, platform, LENDER, question(number)) for number in range(4)]
            with streaming(platform) as streamed:
                streamed()
            for each in asked:
                each.result()
        lose_the_lender(platform)
        # A counter that is born with its first event has a rate with the second.
        wait_for_loan(platform)
        lose_the_lender(platform)
        time.sleep(3 * SCRAPE_S)
        picture(prometheus, begin, "devices", "lending", "rebalancing")
        yield prometheus, begin, time.time()


@pytest.mark.parametrize(
    ("page", "panel"), HERE, ids=[f"{page}: {panel.question}" for page, panel in HERE]
)
def test_a_panels_question_has_an_answer(
    span: tuple[Prometheus, float, float], page: str, panel: Any
) -> None:
    prometheus, begin, end = span
    for query in panel.queries:
        assert answers(prometheus, query, begin, end), query.expr
