"""Metrics of how an engine's requests were scheduled, measured in its front end.

Like vLLM's own metrics they stand in the default registry of the engine's process; the gateway adds
the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from prometheus_client import Gauge, Histogram

WEIGHTED_TURNAROUND = Histogram(
    "loomserve_weighted_turnaround",
    "A request's time in the engine over its time since it was first scheduled.",
    buckets=(1.01, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100),
)
OLDEST_WAITING = Gauge(
    "loomserve_oldest_waiting_seconds",
    "Age of the oldest request that waits to start, or to go on after a preemption.",
)
REQUEST_PREEMPTIONS = Histogram(
    "loomserve_request_preemptions",
    "How often a finished request was preempted.",
    buckets=(0, 1, 2, 3, 5, 10, 20),
)
