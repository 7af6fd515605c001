"""A real Prometheus that scrapes a platform, where there is one (Debian's package prometheus)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

JOB = "loomserve"
"""Which the alerts look for."""


@dataclass(frozen=True)
class Prometheus:
    url: str
    scrape_s: float

    def over(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Series of an expression over a span of Unix seconds, with their numbers alone."""
        span = {"start": begin, "end": end, "step": self.scrape_s}
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
        found: dict[str, Any] = answer.raise_for_status().json()["data"]
        return found


@contextmanager
def scraping(
    url: str,
    folder: Path,
    rules: Path,
    *,
    token: str | None = None,
    scrape_s: float = 2,
    timeout_s: float = 30,
) -> Iterator[Prometheus]:
    """Prometheus, from its first scrape of a platform on.

    Args:
        url: the platform's, where its metrics are.
        folder: is filled with its configuration, log and data.
        rules: a file of alerts.
        token: opens the metrics; None: they are open.
        scrape_s: how often it scrapes, and looks at the rules.
        timeout_s: until when it must have scraped the platform.

    Raises:
        FileNotFoundError: there is no Prometheus here.
        TimeoutError: it could not scrape the platform.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("there is no prometheus here (Debian: apt install prometheus)")
    every = f"{round(1000 * scrape_s)}ms"  # it knows no fractions
    scraped: dict[str, Any] = {
        "job_name": JOB,
        "static_configs": [{"targets": [url.removeprefix("http://")]}],
    }
    if token is not None:
        scraped["authorization"] = {"credentials": token}
    config = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [scraped],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    own = f"127.0.0.1:{_free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={own}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    found = Prometheus(f"http://{own}", scrape_s)
    try:
        _wait_for_scrape(found, process, folder / "prometheus.log", timeout_s)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_scrape(
    prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if prometheus.now(f'up{{job="{JOB}"}}') == [1.0]:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"it has not scraped in {timeout_s:g} s: {log.read_text()}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
