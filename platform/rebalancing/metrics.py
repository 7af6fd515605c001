"""Metrics of the rebalancing controller.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loomserve.platform.rebalancing.plans.reports import RebalancingState, ScalingReport


class RebalancingMetrics(Collector):
    """Shows the last reading; while the controller is away only ``…_up`` is left."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state: RebalancingState | None = None
        registry.register(self)

    def set_state(self, state: RebalancingState | None) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "loomserve_rebalancing_up",
            "1: the controller may act; 0: it does not answer, or another one acts.",
            value=bool(state and state.problem is None),
        )
        if state is not None:
            yield from _loads(state)
            yield from _actions(state)
            yield from _scaling(state.scaling or ScalingReport())


def _loads(state: RebalancingState) -> Iterator[Metric]:
    loads = GaugeMetricFamily(
        "loomserve_rebalancing_utilisation",
        "Of a device: compute that is asked for, or memory in use, as a share.",
        labels=["device", "of"],
    )
    for load in state.devices:
        loads.add_metric([load.device, "compute"], load.compute)
        loads.add_metric([load.device, "memory"], load.memory)
    yield loads
    yield GaugeMetricFamily(
        "loomserve_rebalancing_flaws",
        "Parts of what is measured that keep plans from being made.",
        value=len(state.flaws),
    )


def _actions(state: RebalancingState) -> Iterator[Metric]:
    actions = CounterMetricFamily(
        "loomserve_rebalancing_actions", "Actions that have ended.", labels=["kind", "outcome"]
    )
    for action in state.actions:
        actions.add_metric([action.kind, action.outcome], action.count)
    yield actions
    moved = CounterMetricFamily(
        "loomserve_rebalancing_moved_bytes", "Bytes that actions moved.", labels=["kind"]
    )
    for kind, size in state.moved_bytes.items():
        moved.add_metric([kind], size)
    yield moved
    yield CounterMetricFamily(
        "loomserve_rebalancing_pause_seconds",
        "Time that engines stood still for actions.",
        value=state.paused_s,
    )
    rejected = CounterMetricFamily(
        "loomserve_rebalancing_rejected",
        "Candidates that the planner did not take.",
        labels=["reason"],
    )
    for reason, count in state.rejected.items():
        rejected.add_metric([reason], count)
    yield rejected


def _scaling(report: ScalingReport) -> Iterator[Metric]:
    wanted = GaugeMetricFamily(
        "loomserve_scaling_replicas",
        "Replicas that a model should have by its load.",
        labels=["model"],
    )
    load = GaugeMetricFamily(
        "loomserve_scaling_load",
        "A model's load, in replicas that carry as much.",
        labels=["model"],
    )
    for each in report.models:
        wanted.add_metric([each.model], each.replicas)
        load.add_metric([each.model], each.load)
    yield wanted
    yield load
    decisions = CounterMetricFamily(
        "loomserve_scaling_decisions",
        "Decisions to start or end replicas, and starts that had to wait.",
        labels=["model", "direction", "reason"],
    )
    for count in report.decisions:
        decisions.add_metric([count.model, count.direction, count.reason], count.count)
    yield decisions
