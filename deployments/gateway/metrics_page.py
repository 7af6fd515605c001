"""``/metrics``: the metrics of the gateway, the store, the batch lane and all replicas."""

from __future__ import annotations

import asyncio

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from loomserve.deployments.batch.proxy import BatchProxy
from loomserve.deployments.gateway.forward import Forwarder
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.deployments.kvstore.kv_store import read_usage
from loomserve.kvstore.metrics import KvStoreMetrics
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.batch.metrics import BatchMetrics
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, KvAccess
from loomserve.platform.http.exposition import merge
from loomserve.platform.rebalancing.metrics import RebalancingMetrics
from loomserve.platform.rebalancing.plans.reports import RebalancingState
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import BatchLaneState, KvState

_SCRAPE_TIMEOUT_S = 3.0


class MetricsPage:
    """Endpoint that collects all metrics per request; a source that does not answer is left out."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        registry: CollectorRegistry,
        routes: ModelRoutes,
        forwarder: Forwarder,
        internal_token: str,
        *,
        controller: DeploymentHandle,
        kv: KvAccess | None,
        batches: BatchProxy | None,
    ) -> None:
        """``registry`` holds ``metrics``; ``kv`` and ``batches`` are None if not configured."""
        self._metrics = metrics
        self._registry = registry
        self._routes = routes
        self._forwarder = forwarder
        self._internal_token = internal_token
        self._rebalancing = (controller, RebalancingMetrics(registry))
        self._kv = (kv, KvStoreMetrics(registry)) if kv else None
        self._batches = (batches, BatchMetrics(registry)) if batches else None

    async def show(self, request: Request) -> Response:
        self._metrics.set_decisions(self._forwarder.ledger.decisions())
        if self._kv is not None:
            access, kv_metrics = self._kv
            kv_metrics.set_state(await _kv_state(access))
        if self._batches is not None:
            lane, batch_metrics = self._batches
            batch_metrics.set_state(await _batch_state(lane))
        controller, rebalancing_metrics = self._rebalancing
        rebalancing_metrics.set_state(await _rebalancing_state(controller))
        parts: list[tuple[dict[str, str], str | None]] = [
            ({}, generate_latest(self._registry).decode())
        ]
        parts += await asyncio.gather(
            *(
                self._scrape(route.name, replica.id, replica.device, replica.address)
                for route in self._routes
                for replica in route.replicas
            )
        )
        return Response(
            await asyncio.to_thread(merge, parts),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _scrape(
        self, model: str, replica_id: str, device: str, address: str
    ) -> tuple[dict[str, str], str | None]:
        labels = {"model": model, "replica": replica_id, "device": device}
        try:
            async with self._forwarder.session.get(
                f"http://{address}/metrics",
                headers={INTERNAL_TOKEN_HEADER: self._internal_token},
                timeout=aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_S),
            ) as response:
                return labels, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return labels, None


async def _batch_state(lane: BatchProxy) -> BatchLaneState | None:
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
            return BatchLaneState.model_validate(await lane.ask("state"))
    except (Unavailable, TimeoutError):
        return None


async def _rebalancing_state(controller: DeploymentHandle) -> RebalancingState | None:
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
            return RebalancingState.model_validate(await controller.rebalancing.remote("state"))
    except (RayError, RayServeException, ValidationError, TimeoutError):
        return None


async def _kv_state(kv: KvAccess) -> KvState | None:
    try:
        return await read_usage(kv.address)
    except Unavailable:
        return None
