"""``/metrics``: the metrics of the gateway, the store, the batch lane and all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from loomserve.deployments.batch.proxy import BatchProxy
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.deployments.kvstore.stores import Stores
from loomserve.kvstore.metrics import KvStoreMetrics
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import KeyMetrics
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.metrics import BatchMetrics
from loomserve.platform.config import LOCAL_NODE
from loomserve.platform.fleet.messages import ReplicaRoute
from loomserve.platform.http.exposition import merge, split_gauges
from loomserve.platform.http.other_front_ends import OtherFrontEnds, Part
from loomserve.platform.rebalancing.metrics import RebalancingMetrics
from loomserve.platform.rebalancing.plans.reports import RebalancingState
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.routers.in_flight import InFlight

if TYPE_CHECKING:
    from loomserve.deployments.gateway.front_ends import ModelFrontEnds

_SCRAPE_TIMEOUT_S = 3.0


Refresh = Callable[[], Awaitable[None]]
"""Brings a source's metrics up to date; they vanish while the source does not answer."""


class MetricsPage:
    """Endpoint ``/metrics``: the gateway's registry, refreshed, merged with each replica's page.

    With several front ends, any of them shows those of all, told apart by the label ``front_end``:
    sums over them would fall when one is restarted.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        routes: ModelRoutes,
        front_ends: ModelFrontEnds,
        sources: Sequence[Refresh],
        *,
        own: CollectorRegistry | None = None,
        own_sources: Sequence[Refresh] = (),
        others: OtherFrontEnds | None = None,
    ) -> None:
        """
        Args:
            registry: metrics of the platform, which each front end has alike.
            sources: have their metrics in ``registry``.
            own: metrics of what this front end does.
            own_sources: have their metrics in ``own``.
        """
        self._registry = registry
        self._routes = routes
        self._front_ends = front_ends
        self._sources = sources
        self._own = own
        self._own_sources = own_sources
        self._others = others

    async def show(self, request: Request) -> Response:
        for refresh in self._sources:
            await refresh()
        parts: list[Part] = [({}, generate_latest(self._registry).decode())]
        parts += await self.own()
        if self._others is not None:
            parts += await self._others.parts()
        parts += await asyncio.gather(
            *(
                self._scrape(_labels(route.name, replica), replica.address)
                for route in self._routes
                for replica in route.replicas
            )
        )
        parts += [(labels, gauges) for labels, _, gauges in self._of_replicas()]
        return Response(
            await asyncio.to_thread(merge, parts),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def own(self) -> list[Part]:
        """What this front end has done. Gauges of engines, of which all know alike, are not in."""
        for refresh in self._own_sources:
            await refresh()
        label = self._others.label if self._others is not None else {}
        parts: list[Part] = []
        for labels, page, _ in self._of_replicas():
            # The node of what is of a replica is the replica's.
            others = {name: value for name, value in label.items() if name not in labels}
            parts.append((labels | others, page))
        if self._own is not None:
            parts.insert(0, (label, generate_latest(self._own).decode()))
        return parts

    def _of_replicas(self) -> Iterator[tuple[dict[str, str], str, str]]:
        """The labels of each page that the gateway has of replicas, what it counts, its gauges."""
        for route in self._routes:
            for replica in route.replicas:
                for page in self._front_ends.pages(route.name, replica.id):
                    yield _labels(route.name, replica), *split_gauges(page)

    async def _scrape(self, labels: dict[str, str], address: str) -> Part:
        try:
            return labels, await self._front_ends.get(address, "/metrics", _SCRAPE_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError):
            return labels, None


def _labels(model: str, replica: ReplicaRoute) -> dict[str, str]:
    labels = {"model": model, "replica": replica.id, "device": replica.device}
    return labels if replica.node == LOCAL_NODE else labels | {"node": replica.node}


def routing_source(metrics: GatewayMetrics, ledger: InFlight) -> Refresh:
    async def refresh() -> None:
        metrics.set_decisions(ledger.decisions())

    return refresh


def keys_source(metrics: KeyMetrics, keys: LiveKeys) -> Refresh:
    async def refresh() -> None:
        metrics.set_file(up=keys.problem is None)

    return refresh


def kv_source(registry: CollectorRegistry, stores: Stores) -> Refresh:
    metrics = KvStoreMetrics(registry)

    async def refresh() -> None:
        try:
            metrics.set_states(await stores.usages())
        except Unavailable:
            metrics.set_states({})

    return refresh


def batch_source(registry: CollectorRegistry, lane: BatchProxy) -> Refresh:
    metrics = BatchMetrics(registry)

    async def refresh() -> None:
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                metrics.set_state((await lane.ask("state")).get())
        except (Unavailable, TimeoutError):
            metrics.set_state(None)

    return refresh


def rebalancing_source(registry: CollectorRegistry, controller: DeploymentHandle) -> Refresh:
    metrics = RebalancingMetrics(registry)

    async def refresh() -> None:
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                reply: Reply[RebalancingState] = await controller.rebalancing_state.remote()
                metrics.set_state(reply.get())
        except (RayError, RayServeException, TimeoutError):
            metrics.set_state(None)

    return refresh
