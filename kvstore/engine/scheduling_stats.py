"""Statistics of an engine's scheduler, from EngineCore to Prometheus and the admin API.

vLLM carries a connector's statistics from EngineCore to the engine's front end after every step;
the scheduler's go with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from loomserve.platform.scheduling.preemption_metrics import SCHEDULING, PreemptionMetrics


class SchedulingStats(KVConnectorStats):  # type: ignore[misc]
    """Totals since the engine's start; a later step's replace an earlier one's."""

    data: dict[str, Any]

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> SchedulingStats:
        return cls({SCHEDULING: dict(numbers)})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return other

    def reduce(self) -> dict[str, int | float]:
        numbers = self.data.get(SCHEDULING, {})
        return {name: value for name, value in numbers.items() if isinstance(value, int | float)}

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


class SchedulingMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics that vLLM registers in the front end, labelled with model and engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = PreemptionMetrics(self._counter_cls, self._gauge_cls, self._labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = tuple(str(label) for label in self.per_engine_labelvalues[engine_idx])
        self._metrics.observe(transfer_stats_data.get(SCHEDULING, {}), labels)
