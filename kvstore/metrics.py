"""Metrics of the KV store.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loomserve.platform.state import KvNetworkState, KvState


class KvStoreMetrics(Collector):
    """Collector of the last reading; while the store is away, of ``loomserve_kv_up`` alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state: KvState | None = None
        registry.register(self)

    def set_state(self, state: KvState | None) -> None:
        """Take a reading of the store; None: the store does not answer."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "loomserve_kv_up", "1: the KV store answers; 0: it does not.", value=state is not None
        )
        if state is not None:
            yield from _bytes(state)
            yield from _blocks(state)
            yield CounterMetricFamily(
                "loomserve_kv_corrupt_blocks",
                "Blocks whose checksum failed.",
                value=state.corrupt_blocks,
            )
            if state.network is not None:
                yield from _network(state.network)


def _bytes(state: KvState) -> Iterator[Metric]:
    capacity = GaugeMetricFamily(
        "loomserve_kv_capacity_bytes", "Space for blocks.", labels=["tier"]
    )
    capacity.add_metric(["memory"], state.capacity_bytes)
    capacity.add_metric(["ssd"], state.ssd_capacity_bytes)
    yield capacity
    used = GaugeMetricFamily(
        "loomserve_kv_used_bytes", "Space that blocks occupy.", labels=["tier"]
    )
    used.add_metric(["memory"], state.used_bytes)
    used.add_metric(["ssd"], state.ssd_used_bytes)
    yield used


def _blocks(state: KvState) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "loomserve_kv_blocks", "Blocks in the store.", labels=["model", "tier"]
    )
    hits = CounterMetricFamily(
        "loomserve_kv_hit_blocks", "Blocks looked up and found.", labels=["model"]
    )
    misses = CounterMetricFamily(
        "loomserve_kv_missed_blocks", "Blocks looked up and not found.", labels=["model"]
    )
    evictions = CounterMetricFamily(
        "loomserve_kv_evicted_blocks", "Blocks that left memory for others.", labels=["model"]
    )
    for model in state.models:
        blocks.add_metric([model.model, "memory"], model.blocks_in_memory)
        blocks.add_metric([model.model, "ssd"], model.blocks_on_ssd)
        hits.add_metric([model.model], model.hit_blocks)
        misses.add_metric([model.model], model.missed_blocks)
        evictions.add_metric([model.model], model.evicted_blocks)
    yield from (blocks, hits, misses, evictions)


def _network(network: KvNetworkState) -> Iterator[Metric]:
    for name, text, gauge in (
        ("peers", "Stores of other nodes.", len(network.peers)),
        (
            "directory_blocks",
            "Blocks of other nodes that the store knows of.",
            network.directory_blocks,
        ),
    ):
        known = GaugeMetricFamily(f"loomserve_kv_{name}", text, labels=["node"])
        known.add_metric([network.node], gauge)
        yield known
    for name, text, count in (
        (
            "missed_messages",
            "Announcements of other nodes that were missed.",
            network.missed_messages,
        ),
        ("fetched_blocks", "Blocks fetched from other nodes.", network.fetched_blocks),
        ("fetched_bytes", "Bytes of those.", network.fetched_bytes),
    ):
        counted = CounterMetricFamily(f"loomserve_kv_{name}", text, labels=["node"])
        counted.add_metric([network.node], count)
        yield counted
    failed = CounterMetricFamily(
        "loomserve_kv_failed_fetches",
        "Fetches that brought nothing, or a block that was not whole.",
        labels=["node", "reason"],
    )
    for reason, count in network.failed_fetches.items():
        failed.add_metric([network.node, reason], count)
    yield failed
    rate = GaugeMetricFamily(
        "loomserve_kv_link_bytes_per_second",
        "Rate of fetches from another node, as measured.",
        labels=["node", "peer"],
    )
    for peer in network.peers:
        rate.add_metric([network.node, peer.node], peer.bytes_per_s)
    yield rate
