"""Metrics of how an engine's requests were scheduled, measured in its process.

The gateway adds the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest


class ScheduledRequestMetrics:
    """Those of one engine, in a registry of their own."""

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
        """Take in a request that has its whole answer."""
        self._weighted_turnaround.observe(weighted_turnaround)
        self._preemptions.observe(preemptions)

    def page(self, oldest_waiting_s: float) -> str:
        """All of them as Prometheus reads them."""
        self._oldest_waiting.set(oldest_waiting_s)
        return generate_latest(self._registry).decode()
