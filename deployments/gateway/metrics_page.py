"""``/metrics``: the metrics of the gateway, the store, the batch lane and all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from loomserve.deployments.batch.proxy import BatchProxy
from loomserve.deployments.kvstore.stores import Stores
from loomserve.kvstore.metrics import KvStoreMetrics
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import KeyMetrics
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.metrics import BatchMetrics
from loomserve.platform.config import LOCAL_NODE
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.http.exposition import merge, split_gauges
from loomserve.platform.http.other_gateways import OtherGateways, Part
from loomserve.platform.rebalancing.metrics import RebalancingMetrics
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import KvState
from loomserve.routers.in_flight import InFlight

if TYPE_CHECKING:
    from loomserve.deployments.gateway.request_dispatcher import RequestDispatcher

T = TypeVar("T")
_SCRAPE_TIMEOUT_S = 3.0

Refresh = Callable[[], Awaitable[None]]
"""Brings a source's metrics up to date; they vanish while the source does not answer."""


@dataclass(eq=False)
class MetricsPage:
    """Endpoint ``/metrics``: the gateway's registry, refreshed, merged with each replica's page.

    With several gateways, any of them shows those of all, told apart by the label ``front_end``:
    sums over them would fall when one is restarted.
    """

    registry: CollectorRegistry
    """Of the platform's metrics, which each gateway has alike."""
    routes: Iterable[ModelRoute]
    dispatcher: RequestDispatcher
    sources: Sequence[Refresh]
    """Of metrics in ``registry``."""
    _: KW_ONLY
    own: CollectorRegistry | None = None
    """Of metrics of what this gateway does."""
    own_sources: Sequence[Refresh] = ()
    """Of metrics in ``own``."""
    others: OtherGateways | None = None

    async def show(self, request: Request) -> Response:
        for refresh in self.sources:
            await refresh()
        parts: list[Part] = [({}, generate_latest(self.registry).decode())]
        parts += await self.own_parts()
        if self.others is not None:
            parts += await self.others.parts()
        parts += await asyncio.gather(
            *(
                self._scrape(_labels(route.name, replica), replica.address)
                for route in self.routes
                for replica in route.replicas
            )
        )
        parts += [(labels, gauges) for labels, _, gauges in self._of_replicas()]
        return Response(
            await asyncio.to_thread(merge, parts),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def own_parts(self) -> list[Part]:
        """What this gateway has done. Gauges of engines, of which all know alike, are not in."""
        for refresh in self.own_sources:
            await refresh()
        label = self.others.label if self.others is not None else {}
        parts: list[Part] = []
        for labels, page, _ in self._of_replicas():
            # The node of what is of a replica is the replica's.
            others = {name: value for name, value in label.items() if name not in labels}
            parts.append((labels | others, page))
        if self.own is not None:
            parts.insert(0, (label, generate_latest(self.own).decode()))
        return parts

    def _of_replicas(self) -> Iterator[tuple[dict[str, str], str, str]]:
        """The labels of each page that the gateway has of replicas, what it counts, its gauges."""
        for route in self.routes:
            for replica in route.replicas:
                for page in self.dispatcher.pages(route.name, replica.id):
                    yield _labels(route.name, replica), *split_gauges(page)

    async def _scrape(self, labels: dict[str, str], address: str) -> Part:
        try:
            return labels, await self.dispatcher.client.get(address, "/metrics", _SCRAPE_TIMEOUT_S)
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
    nothing: dict[str, KvState] = {}
    return _source(KvStoreMetrics(registry).set_states, stores.usages, nothing)


def batch_source(registry: CollectorRegistry, lane: BatchProxy) -> Refresh:
    return _source(BatchMetrics(registry).set_state, lambda: _value(lane.ask("state")), None)


def rebalancing_source(registry: CollectorRegistry, controller: DeploymentHandle) -> Refresh:
    set_state = RebalancingMetrics(registry).set_state
    return _source(set_state, lambda: _value(controller.rebalancing_state.remote()), None)


async def _value(reply: Awaitable[Reply[T]]) -> T:
    return (await reply).get()


def _source(set_state: Callable[[T], None], ask: Callable[[], Awaitable[T]], away: T) -> Refresh:
    """Sets the state that ``ask`` gives, or ``away`` where nobody answers in time."""

    async def refresh() -> None:
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                set_state(await ask())
        except (RayError, RayServeException, Unavailable, TimeoutError):
            set_state(away)

    return refresh
