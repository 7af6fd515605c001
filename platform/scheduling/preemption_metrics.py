"""Metrics of an engine's preemptions, with their predicted and measured costs.

Unlike other metrics of an engine they come from its EngineCore, as totals since its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    "decision_s": (
        "scheduling_seconds",
        {},
        "Time that queue orders and preemption modes took.",
    ),
}
GAUGES = {
    "swap_used_bytes": "Bytes of swap space that preempted requests occupy.",
    "swap_capacity_bytes": "Bytes of swap space that they may occupy.",
}


class PreemptionMetrics:
    """Prometheus metrics made by ``counter`` and ``gauge``, with the ``labels`` of an engine."""

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
