"""Metrics of the KV store.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loomserve.platform.state import KvNetworkState, KvState

_Family = GaugeMetricFamily | CounterMetricFamily


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
        families: dict[str, _Family] = {}
        for node, state in self._states.items():
            for kind, name, text, value, labels in _samples(state):
                # Of several stores, their nodes are a label.
                labels = {"node": node} | labels if self._states.keys() != {""} else labels
                if name not in families:
                    families[name] = kind(f"loomserve_kv_{name}", text, labels=list(labels))
                families[name].add_metric(list(labels.values()), value)
        yield from families.values()


class _Sample(NamedTuple):
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    value: float
    labels: dict[str, str]


def _gauge(name: str, text: str, value: float, **labels: str) -> _Sample:
    return _Sample(GaugeMetricFamily, name, text, value, labels)


def _counter(name: str, text: str, value: float, **labels: str) -> _Sample:
    return _Sample(CounterMetricFamily, name, text, value, labels)


def _samples(state: KvState) -> Iterator[_Sample]:
    for tier, capacity, used in (
        ("memory", state.capacity_bytes, state.used_bytes),
        ("ssd", state.ssd_capacity_bytes, state.ssd_used_bytes),
    ):
        yield _gauge("capacity_bytes", "Space for blocks.", capacity, tier=tier)
        yield _gauge("used_bytes", "Space that blocks occupy.", used, tier=tier)
    for of in state.models:
        for tier, blocks in (("memory", of.blocks_in_memory), ("ssd", of.blocks_on_ssd)):
            yield _gauge("blocks", "Blocks in the store.", blocks, model=of.model, tier=tier)
        for name, text, count in (
            ("hit_blocks", "Blocks looked up and found.", of.hit_blocks),
            ("missed_blocks", "Blocks looked up and not found.", of.missed_blocks),
            ("evicted_blocks", "Blocks that left memory for others.", of.evicted_blocks),
        ):
            yield _counter(name, text, count, model=of.model)
    yield _counter("corrupt_blocks", "Blocks whose checksum failed.", state.corrupt_blocks)
    if state.network is not None:
        yield from _of_network(state.network)


def _of_network(network: KvNetworkState) -> Iterator[_Sample]:
    known = "Blocks of other nodes that the store knows of."
    missed = "Announcements of other nodes that were missed."
    failed = "Fetches that brought nothing, or a block that was not whole."
    rate = "Rate of fetches from another node, as measured."
    yield _gauge("peers", "Stores of other nodes.", len(network.peers))
    yield _gauge("directory_blocks", known, network.directory_blocks)
    yield _counter("missed_messages", missed, network.missed_messages)
    yield _counter("fetched_blocks", "Blocks fetched from other nodes.", network.fetched_blocks)
    yield _counter("fetched_bytes", "Bytes of those.", network.fetched_bytes)
    for reason, count in network.failed_fetches.items():
        yield _counter("failed_fetches", failed, count, reason=reason)
    for peer in network.peers:
        yield _gauge("link_bytes_per_second", rate, peer.bytes_per_s, peer=peer.node)
