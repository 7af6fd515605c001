"""A real Prometheus that scrapes a platform, where there is one (Debian's package prometheus)."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.conftest import Platform, free_port

SCRAPE_S = 2
# As Grafana works it out.
RATE_INTERVAL = f"{4 * SCRAPE_S}s"
START_TIMEOUT_S = 30


@dataclass(frozen=True)
class Prometheus:
    url: str

    def over(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Series of an expression over a span of Unix seconds, with their numbers alone."""
        span = {"start": begin, "end": end, "step": SCRAPE_S}
        found = self._ask("query_range", query=expression, **span)["result"]
        return [
            {"labels": each["metric"], "points": points}
            for each in found
            if (points := [(at, float(value)) for at, value in each["values"] if value != "NaN"])
        ]

    def now(self, expression: str) -> list[float]:
        """An expression's values at present."""
        found = self._ask("query", query=expression)["result"]
        return [float(each["value"][1]) for each in found]

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health and the last error."""
        groups = self._ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _ask(self, what: str, **query: Any) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=query, timeout=30)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["data"]
        return found


@contextmanager
def scraping(platform: Platform, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Prometheus, from its first scrape of the platform on."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus here (Debian: apt install prometheus)")
    port = free_port()
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "loomserve",
                "authorization": {"credentials": platform.admin_token},
                "static_configs": [{"targets": [platform.url.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _wait_for_scrape(found, process, folder / "prometheus.log")
        yield found
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_scrape(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if prometheus.now('up{job="loomserve"}') == [1.0]:
                return
        except (httpx.HTTPError, AssertionError):
            pass
        time.sleep(0.2)
    pytest.fail(f"it has not scraped the platform in {START_TIMEOUT_S} s: {log.read_text()}")
