"""Which alerts of a day are false, by the faults that there were."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks.day_alerts import (
    BURST,
    CONTROLLER,
    LENDER,
    MAY_FIRE,
    Alarm,
    Fault,
    alarms,
    report,
)
from benchmarks.prometheus import Prometheus
from tests.unit.dashboards.test_alerts import NAMES

BEGIN = 1_000_000.0
KILLED = Fault(LENDER, 100, 160)


def test_what_may_fire_are_alerts_that_there_are() -> None:
    assert MAY_FIRE.keys() <= set(NAMES)
    assert {what for of in MAY_FIRE.values() for what in of} == {BURST, LENDER, CONTROLLER}


@pytest.mark.parametrize(
    ("alert", "at_s", "causes"),
    [
        ("LoomserveLoansBreak", 99, []),
        ("LoomserveLoansBreak", 101, [LENDER]),
        ("LoomserveLoansBreak", 160 + 599, [LENDER]),
        ("LoomserveLoansBreak", 160 + 601, []),
        ("LoomserveEnginesEnd", 160 + 601, [LENDER]),
        ("LoomserveQueueStuck", 120, []),
        ("LoomserveBatchLaneDown", 120, []),
    ],
)
def test_an_alert_is_justified_by_its_own_faults_while_its_rule_sees_them(
    alert: str, at_s: float, causes: list[str]
) -> None:
    assert Alarm(alert, {}, at_s, at_s).causes([KILLED]) == causes


def test_the_report_counts_false_alarms_and_names_those_that_nearly_fired() -> None:
    good = Alarm("LoomserveLoansBreak", {"model": "north"}, 130, 200)
    false = Alarm("LoomserveBatchLate", {}, 5, 10)
    nearly = [good, Alarm("LoomserveControllerAway", {}, 300, 310)]
    found = report([false, good], nearly, [KILLED, KILLED], 20)
    assert found["false_alarms"] == 1
    assert [each["because_of"] for each in found["fired"]] == [[], [LENDER, LENDER]]
    assert found["pending_but_not_fired"] == ["LoomserveControllerAway"]


SERIES = [
    ({"alertname": "LoomserveQueueStuck", "model": "north", "severity": "ticket"}, [40, 45, 50]),
    ({"alertname": "LoomserveBatchLate", "severity": "ticket"}, [10, 15, 60, 65]),
]


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        (asked,) = parse_qs(urlsplit(self.path).query)["query"]
        found: list[dict[str, Any]] = [
            {
                "metric": {"__name__": "ALERTS", "alertstate": "firing", **labels},
                "values": [[BEGIN + at, "1"] for at in times],
            }
            for labels, times in SERIES
            if asked == 'ALERTS{alertstate="firing"}'
        ]
        body = json.dumps({"data": {"result": found}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Prometheus(f"http://127.0.0.1:{server.server_port}", scrape_s=5)
        server.shutdown()
        thread.join()


def test_spans_of_an_alert_are_told_apart_in_their_order(prometheus: Prometheus) -> None:
    found = alarms(prometheus, BEGIN, BEGIN + 100, "firing")
    assert found == [
        Alarm("LoomserveBatchLate", {}, 10, 15),
        Alarm("LoomserveQueueStuck", {"model": "north"}, 40, 50),
        Alarm("LoomserveBatchLate", {}, 60, 65),
    ]
    assert alarms(prometheus, BEGIN, BEGIN + 100, "pending") == []
