"""Rates at which running sums grow, from the heartbeats of a short while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from loomserve.platform.fleet.messages import Heartbeat


def sums_of(report: Heartbeat) -> tuple[float, dict[str, float]] | None:
    """The time of an engine's measurements, and its sums since it started; None: it has none."""
    load = report.stats.load
    if load is None or load.work is None:
        return None
    work = load.work
    sums = {
        "prefill": work.prefill_s,
        "attention": work.attention_s,
        "linear": work.linear_s,
        "tokens": float(work.tokens),
        "requests": float(load.requests),
    }
    for loan in report.loans:
        sums[loan.name] = loan.service_share * loan.age_s
    return load.measured_at, sums


class Rates:
    """Rates of many engines' sums. An engine that is restarted has a new id."""

    def __init__(self, window_s: float = 10.0) -> None:
        """Rates are taken over ``window_s``, half of which must have been seen."""
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, Mapping[str, float]]]] = {}

    def take(self, engine: str, at_s: float, sums: Mapping[str, float]) -> None:
        """Take in a heartbeat, unless it is no newer than the last."""
        seen = self._seen.setdefault(engine, deque())
        if seen and at_s <= seen[-1][0]:
            return
        seen.append((at_s, sums))
        while len(seen) > 2 and seen[1][0] <= at_s - self._window_s:
            seen.popleft()

    def keep(self, engines: Iterable[str]) -> None:
        """Forget all others."""
        there = set(engines)
        for gone in self._seen.keys() - there:
            del self._seen[gone]

    def of(self, engine: str) -> dict[str, float] | None:
        """Growth of each sum in a second; None before enough was seen. A sum that the first
        heartbeat lacks has grown from nothing; a sum that shrank began again, and counts from
        there."""
        seen = self._seen.get(engine)
        if not seen:
            return None
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        span_s = last_s - first_s
        if span_s < self._window_s / 2:
            return None
        return {
            name: (total - before if total >= (before := first.get(name, 0.0)) else total) / span_s
            for name, total in last.items()
        }
