"""vLLM's statistics of each replica, in registries of their own.

vLLM registers its metrics with the process and removes others'; here one process has several models
with several replicas each.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from loomserve.platform.disaggregation.metrics import HandoffMetrics

_PARTS = ("_spec_decoding_cls", "_kv_connector_cls", "_perf_metrics_cls", "_ec_connector_cls")


class _OfReplica(NamedTuple):
    registry: CollectorRegistry
    logger: Any
    handoffs: HandoffMetrics


class ReplicaStatistics:
    """Replaces vLLM's manager of loggers: one Prometheus logger a replica, by its index, which
    outputs carry as ``engine_index``."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._loggers: dict[int, _OfReplica] = {}

    def add(self, index: int) -> None:
        if index in self._loggers:
            return
        registry = CollectorRegistry()
        logger = _logger_class(registry)(self._config, [0])
        logger.log_engine_initialized()
        self._loggers[index] = _OfReplica(registry, logger, HandoffMetrics(registry))

    def remove(self, index: int) -> None:
        self._loggers.pop(index, None)

    def page(self, index: int, running: int, waiting: int) -> str | None:
        """A replica's metrics as text; None: it is not known. ``running`` and ``waiting`` are its
        engine's requests from all gateway processes: only one of these gets a step's statistics."""
        known = self._loggers.get(index)
        if known is None:
            return None
        known.logger.gauge_scheduler_running[0].set(running)
        known.logger.gauge_scheduler_waiting[0].set(waiting)
        return generate_latest(known.registry).decode()

    def handoffs(self, index: int) -> HandoffMetrics | None:
        known = self._loggers.get(index)
        return None if known is None else known.handoffs

    # What vLLM calls

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        known = self._loggers.get(engine_idx or 0)
        if known is not None:  # else the last outputs of a replica that has been removed
            known.logger.record(scheduler_stats, iteration_stats, mm_cache_stats, 0)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        for known in self._loggers.values():
            known.logger.record_sleep_state(sleep, level)

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing: vLLM tells of requests that no replica has got yet."""

    def log(self) -> None:
        """Nothing: the platform shows metrics, and writes no statistics into its log."""

    def log_engine_initialized(self) -> None:
        """Nothing: :meth:`add` does it."""


def _logger_class(registry: CollectorRegistry) -> Any:
    classes = {
        "_gauge_cls": partial(Gauge, registry=registry),
        "_counter_cls": partial(Counter, registry=registry),
        "_histogram_cls": partial(Histogram, registry=registry),
    }
    stock = PrometheusStatLogger
    parts = {
        name: type(base.__name__, (base,), classes)
        for name in _PARTS
        for base in [getattr(stock, name)]
    }
    return type("RegisteredStatLogger", (stock,), {**classes, **parts})
