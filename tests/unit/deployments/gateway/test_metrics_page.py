"""One page of all metrics, from which a source that does not answer is left out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from ray.serve.exceptions import RayServeException
from starlette.requests import Request

from loomserve.deployments.gateway.metrics_page import (
    MetricsPage,
    batch_source,
    rebalancing_source,
    routing_source,
)
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ModelStatus
from loomserve.routers.in_flight import InFlight

ROUTE = ModelRoute(
    name="chat", app="model:chat", status=ModelStatus.READY, policy="load_aware",
    max_concurrent_requests=1, max_model_len=10, kvstore=False,
    replicas=tuple(ReplicaRoute(id=id, device="d", address=id) for id in ("there", "gone")),
)  # fmt: skip


class Engines:
    """The forwarder, for which one of two replicas answers."""

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        assert path == "/metrics"
        if address == "gone":
            raise TimeoutError
        return "# TYPE up gauge\nup 1\n"


class Away:
    """A batch lane and a controller that are restarted."""

    def __init__(self) -> None:
        self.rebalancing_state = SimpleNamespace(remote=self._restarted)

    async def ask(self, method: str) -> Any:
        raise Unavailable("away")

    async def _restarted(self) -> Any:
        raise RayServeException("away")


def shown(registry: CollectorRegistry, *sources: Any) -> str:
    routes: Any = [ROUTE]
    engines: Any = Engines()
    page = MetricsPage(registry, routes, engines, sources)
    response = asyncio.run(page.show(Request({"type": "http"})))
    return bytes(response.body).decode()


def test_every_replica_is_on_the_page_or_reported_as_missing() -> None:
    registry = CollectorRegistry()
    Gauge("own", "The gateway's own.", registry=registry).set(3)
    page = shown(registry)
    assert "own 3.0" in page
    assert 'up{model="chat",replica="there",device="d"} 1' in page
    assert 'loomserve_scrape_up{model="chat",replica="gone",device="d"} 0' in page


def test_sources_are_read_for_each_page_and_those_away_are_shown_as_such() -> None:
    registry, ledger, away = CollectorRegistry(), InFlight(), Away()
    lane: Any = away
    sources = [
        routing_source(GatewayMetrics(registry), ledger),
        batch_source(registry, lane),
        rebalancing_source(registry, lane),
    ]
    ledger.decided("chat", "load_aware", "least_loaded")
    page = shown(registry, *sources)
    decisions = 'loomserve_route_decisions_total{model="chat",policy="load_aware"'
    assert decisions + ',reason="least_loaded"} 1.0' in page
    assert "loomserve_batch_up 0.0" in page
    assert "loomserve_rebalancing_up 0.0" in page
