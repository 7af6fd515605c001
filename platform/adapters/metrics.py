"""A gateway's metrics of adapters."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from loomserve.platform.adapters.messages import AdapterRoute


class AdapterMetrics:
    """Described for operators in ``docs/metrics.md``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "loomserve_adapter_requests",
            "Requests for an adapter; those of its model count them, too.",
            ["model", "adapter", "status"],
            registry=registry,
        )
        self._replicas = Gauge(
            "loomserve_adapter_replicas",
            "Replicas that have an adapter.",
            ["model", "adapter"],
            registry=registry,
        )
        self._known: set[tuple[str, str]] = set()

    def set_adapters(self, routes: Iterable[AdapterRoute]) -> None:
        having = {
            (route.adapter.model, route.adapter.name): len(route.replicas)
            for route in routes
            if not route.leaves
        }
        for gone in self._known - having.keys():
            self._replicas.remove(*gone)
        for labels, replicas in having.items():
            self._replicas.labels(*labels).set(replicas)
        self._known = set(having)

    def finished(self, model: str, adapter: str, status: int) -> None:
        self._requests.labels(model, adapter, str(status)).inc()
