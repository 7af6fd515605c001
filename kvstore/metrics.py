"""Metrics of the KV store.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loomserve.platform.state import KvNetworkState, KvState


class KvStoreMetrics(Collector):
    """Collector of the last readings; while no store answers, of ``loomserve_kv_up`` alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._states: Mapping[str, KvState] = {}
        registry.register(self)

    def set_states(self, states: Mapping[str, KvState]) -> None:
        """Take readings of the stores that answer, by their nodes; of the only one by no name."""
        self._states = states

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "loomserve_kv_up", "1: the KV store answers; 0: it does not.", value=bool(self._states)
        )
        if not self._states:
            return
        families = _Families(nodes=self._states.keys() != {""})
        for node, state in self._states.items():
            families.node = node
            _bytes(families, state)
            _blocks(families, state)
            families.counter(
                "loomserve_kv_corrupt_blocks", "Blocks whose checksum failed.", state.corrupt_blocks
            )
            if state.network is not None:
                _network(families, state.network)
        yield from families.all.values()


class _Families:
    """Metrics with samples of one store after the other, of several with their node as a label."""

    def __init__(self, *, nodes: bool) -> None:
        self.all: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self.node = ""
        self._nodes = nodes

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        if self._nodes:
            labels = {"node": self.node} | labels
        if name not in self.all:
            self.all[name] = kind(name, text, labels=list(labels))
        self.all[name].add_metric(list(labels.values()), value)


def _bytes(families: _Families, state: KvState) -> None:
    for tier, capacity, used in (
        ("memory", state.capacity_bytes, state.used_bytes),
        ("ssd", state.ssd_capacity_bytes, state.ssd_used_bytes),
    ):
        families.gauge("loomserve_kv_capacity_bytes", "Space for blocks.", capacity, tier=tier)
        families.gauge("loomserve_kv_used_bytes", "Space that blocks occupy.", used, tier=tier)


def _blocks(families: _Families, state: KvState) -> None:
    for of in state.models:
        for tier, blocks in (("memory", of.blocks_in_memory), ("ssd", of.blocks_on_ssd)):
            families.gauge(
                "loomserve_kv_blocks", "Blocks in the store.", blocks, model=of.model, tier=tier
            )
        for name, text, count in (
            ("hit", "Blocks looked up and found.", of.hit_blocks),
            ("missed", "Blocks looked up and not found.", of.missed_blocks),
            ("evicted", "Blocks that left memory for others.", of.evicted_blocks),
        ):
            families.counter(f"loomserve_kv_{name}_blocks", text, count, model=of.model)


def _network(families: _Families, network: KvNetworkState) -> None:
    families.gauge("loomserve_kv_peers", "Stores of other nodes.", len(network.peers))
    families.gauge(
        "loomserve_kv_directory_blocks",
        "Blocks of other nodes that the store knows of.",
        network.directory_blocks,
    )
    for name, text, count in (
        (
            "missed_messages",
            "Announcements of other nodes that were missed.",
            network.missed_messages,
        ),
        ("fetched_blocks", "Blocks fetched from other nodes.", network.fetched_blocks),
        ("fetched_bytes", "Bytes of those.", network.fetched_bytes),
    ):
        families.counter(f"loomserve_kv_{name}", text, count)
    for reason, count in network.failed_fetches.items():
        families.counter(
            "loomserve_kv_failed_fetches",
            "Fetches that brought nothing, or a block that was not whole.",
            count,
            reason=reason,
        )
    for peer in network.peers:
        families.gauge(
            "loomserve_kv_link_bytes_per_second",
            "Rate of fetches from another node, as measured.",
            peer.bytes_per_s,
            peer=peer.node,
        )
