"""Messages between the connector's halves around a step, and to the engine's front end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from operator import sub
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from loomserve.kvstore.engine.transfers.transfer import Load, Save
from loomserve.platform.scheduling.metrics import SCHEDULING, PreemptionMetrics


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """Copies that the workers make around one step; each load and save is given by rank.

    ``swap_outs`` are saved before the step, which may overwrite their blocks; ``fetches``, by
    request, are loaded beside this step and later ones.
    """

    loads: list[dict[int, Load]] = field(default_factory=list)
    saves: list[dict[int, Save]] = field(default_factory=list)
    swap_outs: list[dict[int, Save]] = field(default_factory=list)
    fetches: dict[str, dict[int, Load]] = field(default_factory=dict)


@dataclass
class Transferred(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Bytes that a worker copied since its last report, and the seconds that took.

    ``out_blocks`` are blocks that were saved, or its parts of them, for ``out_core_s`` seconds of a
    core in all.
    """

    out_bytes: int
    out_s: float
    in_bytes: int
    in_s: float
    out_blocks: int
    out_core_s: float

    def since(self, earlier: Transferred) -> Transferred:
        return Transferred(*map(sub, astuple(self), astuple(earlier)))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Transferred:
        """Sum the bytes of two workers; they copy at the same time, so the longer time counts."""
        assert isinstance(other, Transferred)
        return Transferred(
            self.out_bytes + other.out_bytes,
            max(self.out_s, other.out_s),
            self.in_bytes + other.in_bytes,
            max(self.in_s, other.in_s),
            max(self.out_blocks, other.out_blocks),
            max(self.out_core_s, other.out_core_s),
        )


class SchedulingStats(KVConnectorStats):  # type: ignore[misc]
    """Totals of the scheduler since the engine's start; later ones replace earlier ones. vLLM
    carries a connector's statistics from EngineCore to the front end after every step."""

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
