"""Alerts of a real Prometheus that scrapes a page of metrics, where there is a Prometheus."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.day_alerts import RULES, alarms
from benchmarks.prometheus import scraping
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus (Debian: apt install it)"
)

TOKEN = "opens"
LATE = """
groups:
  - name: test
    rules:
      - {alert: TooDeep, expr: depth > 3, labels: {severity: page}}
      - {alert: MuchTooDeep, expr: depth > 3, for: 1h, labels: {severity: page}}
      - {alert: Never, expr: depth > 9, labels: {severity: page}}
"""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        good = self.headers.get("authorization") == f"Bearer {TOKEN}"
        self.send_response(200 if good else 401)
        self.send_header("content-type", "text/plain")
        self.end_headers()
        self.wfile.write(b'depth{model="chat"} 5\n')

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_fires_is_told_from_what_may_yet(page: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(LATE)
    begin = time.time()
    with scraping(page, tmp_path, tmp_path / "rules.yaml", token=TOKEN, scrape_s=1) as prometheus:
        deadline = time.monotonic() + PATIENCE_S
        while not (fired := alarms(prometheus, begin, time.time(), "firing")):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        pending = alarms(prometheus, begin, time.time(), "pending")
        assert len(prometheus.rules()) == 3
    (alarm,) = fired
    assert (alarm.alert, alarm.of) == ("TooDeep", {"model": "chat"})
    assert 0 < alarm.at_s <= alarm.until_s
    assert [each.alert for each in pending] == ["MuchTooDeep"]


def test_the_platforms_rules_are_taken(page: str, tmp_path: Path) -> None:
    with scraping(page, tmp_path, RULES, token=TOKEN, scrape_s=0.5) as prometheus:
        assert {each["health"] for each in prometheus.rules()} <= {"ok", "unknown"}
        assert len(prometheus.rules()) > 10


def test_a_page_that_cannot_be_read_is_told(page: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with (
        pytest.raises(TimeoutError, match="has not scraped"),
        scraping(page, tmp_path, RULES, token="wrong", scrape_s=1, timeout_s=2),
    ):
        pass
    assert time.monotonic() - begin < PATIENCE_S
