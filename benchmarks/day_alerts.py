"""Which alerts fire in a day of faults, when, and which of them no fault justifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.prometheus import Prometheus

RULES = Path(__file__).parents[1] / "dashboards/alerts.yaml"
BURST = "burst"
"""A fault of its own kind: more is asked for than engines answer at once."""
LENDER, CONTROLLER = "lender is killed", "controller is killed"

_MINUTE_S = 60.0
MAY_FIRE: Mapping[str, Mapping[str, float]] = {
    "LoomserveModelNotReady": {LENDER: _MINUTE_S},
    "LoomserveEnginesEnd": {LENDER: 15 * _MINUTE_S},
    "LoomserveScrapeHole": {LENDER: _MINUTE_S},
    "LoomserveServerErrors": {LENDER: 5 * _MINUTE_S},
    "LoomserveRequestsLost": {LENDER: 15 * _MINUTE_S},
    "LoomserveQueueStuck": {BURST: 3 * _MINUTE_S},
    "LoomserveGatewayQueue": {LENDER: _MINUTE_S},
    "LoomserveKvMemoryShort": {BURST: 5 * _MINUTE_S},
    "LoomserveLoansBreak": {LENDER: 10 * _MINUTE_S},
    "LoomserveControllerAway": {CONTROLLER: _MINUTE_S},
    "LoomserveControllerBlind": {CONTROLLER: 5 * _MINUTE_S, LENDER: 5 * _MINUTE_S},
}
"""For each alert the faults that it is for, and until how many seconds after a fault's end it may
still fire: the span that its rule looks back over. Others have nothing to fire for."""

_NOT_OF = {"__name__", "alertname", "alertstate", "severity", "job", "instance"}


@dataclass(frozen=True)
class Fault:
    """What was done to the platform; seconds after the day's begin."""

    what: str
    at_s: float
    until_s: float


@dataclass(frozen=True)
class Alarm:
    """An alert that fired; seconds after the day's begin."""

    alert: str
    of: Mapping[str, str]
    """Labels by which it is told from others of its name."""
    at_s: float
    until_s: float

    def causes(self, faults: Iterable[Fault]) -> list[str]:
        """The faults that it may have fired for; none: it is a false one."""
        after_s = MAY_FIRE.get(self.alert, {})
        return [
            fault.what
            for fault in faults
            if fault.what in after_s
            and fault.at_s <= self.at_s <= fault.until_s + after_s[fault.what]
        ]


def alarms(prometheus: Prometheus, begin: float, end: float, state: str) -> list[Alarm]:
    """Alerts in a state (``firing``, ``pending``) within a span of Unix seconds, by their begins.

    One that pauses for a scrape or more has fired twice.
    """
    found: list[Alarm] = []
    for series in prometheus.over(f'ALERTS{{alertstate="{state}"}}', begin, end):
        of = {name: value for name, value in series["labels"].items() if name not in _NOT_OF}
        for first, last in _spans([at for at, _ in series["points"]], prometheus.scrape_s):
            found.append(Alarm(series["labels"]["alertname"], of, first - begin, last - begin))
    return sorted(found, key=lambda each: each.at_s)


def _spans(times: Sequence[float], step_s: float) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for at in times:
        if spans and at - spans[-1][1] <= 1.5 * step_s:
            spans[-1] = spans[-1][0], at
        else:
            spans.append((at, at))
    return spans


def report(
    fired: Sequence[Alarm], pending: Sequence[Alarm], faults: Sequence[Fault], rules: int
) -> dict[str, Any]:
    """What the benchmark's result has of alerts."""
    judged = [{**asdict(each), "because_of": each.causes(faults)} for each in fired]
    for each in judged:
        why = ", ".join(sorted(set(each["because_of"]))) or "FALSE: nothing justifies it"
        print(f"{each['at_s']:6.0f} s: {each['alert']} {each['of'] or ''} fired: {why}", flush=True)
    names = {each.alert for each in fired}
    return {
        "rules": rules,
        "fired": judged,
        "false_alarms": sum(not each["because_of"] for each in judged),
        "pending_but_not_fired": sorted({each.alert for each in pending} - names),
    }
