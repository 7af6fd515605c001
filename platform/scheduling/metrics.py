"""Metrics of how an engine's requests were scheduled, measured in its process.

The gateway adds the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

SCHEDULING = "scheduling"
"""Key of these numbers in the statistics of an engine's KV connector."""
# Metric, its labels, and its documentation; totals since the engine's start.
TOTALS: Mapping[str, tuple[str, dict[str, str], str]] = {
    "swapped_out": ("preemptions", {"mode": "swap"}, "Requests that had to leave KV memory."),
    "recomputed": ("preemptions", {"mode": "recompute"}, ""),
    "swapped_in": ("swap_ins", {}, "Preempted requests that came back from swap space."),
    "lost_tokens": ("swap_lost_tokens", {}, "Swapped tokens that had to be computed again."),
    "step_s": ("step_seconds", {}, "Time of the engine's steps whose cost was predicted."),
    "step_predicted_s": ("step_predicted_seconds", {}, "The same time as predicted."),
    "out_s": ("swap_seconds", {"direction": "out"}, "Time of copies between engine and store."),
    "in_s": ("swap_seconds", {"direction": "in"}, ""),
    "out_predicted_s": (
        "swap_predicted_seconds",
        {"direction": "out"},
        "The same time as predicted.",
    ),
    "in_predicted_s": ("swap_predicted_seconds", {"direction": "in"}, ""),
    "decision_s": ("scheduling_seconds", {}, "Time that queue orders and preemption modes took."),
}
GAUGES = {
    "swap_used_bytes": "Bytes of swap space that preempted requests occupy.",
    "swap_capacity_bytes": "Bytes of swap space that they may occupy.",
}


class ScheduledRequestMetrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._weighted_turnaround = Histogram(
            "loomserve_weighted_turnaround",
            "A request's time in the engine over its time since it was first scheduled.",
            buckets=(1.01, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100),
            registry=registry,
        )
        self._oldest_waiting = Gauge(
            "loomserve_oldest_waiting_seconds",
            "Age of the oldest request that waits to start, or to go on after a preemption.",
            registry=registry,
        )
        self._preemptions = Histogram(
            "loomserve_request_preemptions",
            "How often a finished request was preempted.",
            buckets=(0, 1, 2, 3, 5, 10, 20),
            registry=registry,
        )

    def finished(self, weighted_turnaround: float, preemptions: int) -> None:
        self._weighted_turnaround.observe(weighted_turnaround)
        self._preemptions.observe(preemptions)

    def page(self, oldest_waiting_s: float) -> str:
        """All of them in Prometheus's text format."""
        self._oldest_waiting.set(oldest_waiting_s)
        return generate_latest(self._registry).decode()


class PreemptionMetrics:
    """Metrics of preemptions, with their predicted and measured costs, as totals since the start.
    Other than the above they come from the EngineCore, with the statistics of its KV connector."""

    def __init__(
        self, counter: Callable[..., Any], gauge: Callable[..., Any], labels: Sequence[str]
    ) -> None:
        self._counters = {
            metric: counter(f"loomserve_{metric}", documentation, [*labels, *own])
            for metric, own, documentation in TOTALS.values()
            if documentation
        }
        self._gauges = {
            name: gauge(f"loomserve_{name}", documentation, labels)
            for name, documentation in GAUGES.items()
        }
        self._seen: Counter[tuple[str, ...]] = Counter()

    def observe(self, numbers: Mapping[str, Any], labels: tuple[str, ...]) -> None:
        """Take over the latest totals of the engine with these label values."""
        for name, (metric, own, _) in TOTALS.items():
            grown = numbers.get(name, 0) - self._seen[*labels, name]
            self._counters[metric].labels(*labels, *own.values()).inc(grown)
            self._seen[*labels, name] += grown
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(numbers.get(name, 0))
