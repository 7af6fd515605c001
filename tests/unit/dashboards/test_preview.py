"""A preview has the panels' questions, and the lines of what Prometheus answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dashboards.panels import Dashboard, Panel, Query, number
from dashboards.preview import Answers, draw, shown_as

ASKED: list[dict[str, list[str]]] = []
PAGE = Dashboard(
    "page",
    "page",
    (
        number("How many?", "Count.", "up", "reqps"),
        Panel("Which?", "Look.", (Query('x{model=~"$model"}[$__rate_interval]', "{{model}} is"),)),
        Panel("None?", "Look.", (Query("nothing"),)),
    ),
)


class _Prometheus(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        ASKED.append(asked)
        begin = float(asked["start"][0])
        series = {"metric": {"model": "chat"}, "values": [[begin, "1"], [begin + 9, "2.5"]]}
        result = [] if asked["query"] == ["nothing"] else [series]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": result}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def answers() -> Iterator[Answers]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Prometheus) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Answers(f"http://127.0.0.1:{server.server_port}", seconds=600, scrape_s=15)
        server.shutdown()
        thread.join()


def test_variables_are_filled_and_lines_are_named(answers: Answers) -> None:
    (line,) = answers.of(PAGE.panels[1].queries[0])
    assert ASKED[0]["query"] == ['x{model=~".*"}[60s]']
    assert line.name == "chat is"
    assert list(line.values) == [1, 2.5]


def test_a_page_has_its_questions_numbers_and_lines(answers: Answers, tmp_path: Path) -> None:
    draw(PAGE, answers, tmp_path / "page.svg")
    assert (tmp_path / "page.svg").read_text().startswith("<?xml")
    assert len(ASKED) == len(PAGE.panels)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(0.1234, "percentunit", "12.3%"), (1.5, "s", "1.5 s"), (2, "ops", "2/s"), (7, "none", "7")],
)
def test_numbers_are_shown_with_their_units(value: float, unit: str, shown: str) -> None:
    assert shown_as(value, unit) == shown
