"""Metrics of the batch lane.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loomserve.platform.state import BatchLaneState


class BatchMetrics(Collector):
    """Collector of the lane's last state; while it is away, of ``loomserve_batch_up`` only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state: BatchLaneState | None = None
        registry.register(self)

    def set_state(self, state: BatchLaneState | None) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "loomserve_batch_up", "1: the batch lane answers; 0: it does not.", value=bool(state)
        )
        if state is not None:
            yield from _batches(state)
            yield from _lines(state)
            if state.offline_models:
                yield from _offline_models(state)


def _batches(state: BatchLaneState) -> Iterator[Metric]:
    batches = GaugeMetricFamily("loomserve_batch_batches", "Batches.", labels=["status"])
    for status, count in state.by_status.items():
        batches.add_metric([status], count)
    yield batches
    etas = [batch.eta_s for batch in state.batches if batch.eta_s is not None]
    yield GaugeMetricFamily(
        "loomserve_batch_eta_seconds", "Until the last batch is done.", value=max(etas, default=0)
    )
    yield GaugeMetricFamily(
        "loomserve_batch_late",
        "Batches about to miss their window.",
        value=sum(batch.late for batch in state.batches),
    )


def _lines(state: BatchLaneState) -> Iterator[Metric]:
    in_flight = sum(batch.in_flight for batch in state.batches)
    unanswered = sum(batch.total - batch.completed - batch.failed for batch in state.batches)
    open_lines = GaugeMetricFamily(
        "loomserve_batch_open_lines", "Lines without an answer.", labels=["at"]
    )
    open_lines.add_metric(["engine"], in_flight)
    open_lines.add_metric(["queue"], max(0, unanswered - in_flight))
    yield open_lines
    lines = CounterMetricFamily("loomserve_batch_lines", "Lines answered.", labels=["outcome"])
    lines.add_metric(["completed"], state.answered_lines)
    lines.add_metric(["failed"], state.failed_lines)
    yield lines
    yield CounterMetricFamily(
        "loomserve_batch_retries", "Attempts that engines failed on.", value=state.retries
    )


def _offline_models(state: BatchLaneState) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "loomserve_batch_offline_up", "1: the model's process is ready.", labels=["model"]
    )
    batches = CounterMetricFamily(
        "loomserve_batch_offline_batches", "Static batches that ended.", labels=["model", "outcome"]
    )
    for model in state.offline_models:
        up.add_metric([model.name], model.ready)
        batches.add_metric([model.name, "completed"], model.batches)
        batches.add_metric([model.name, "out_of_memory"], model.splits)
    yield up
    yield batches
