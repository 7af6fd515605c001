"""One page of all metrics, from which a source that does not answer is left out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from ray.serve.exceptions import RayServeException
from starlette.requests import Request

from loomserve.deployments.gateway.metrics_page import (
    MetricsPage,
    batch_source,
    rebalancing_source,
    routing_source,
)
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.config import Server
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, ModelRoute
from loomserve.platform.http.other_gateways import OtherGateways, take_place
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.run.folder import RUN_VARIABLE
from loomserve.platform.run.sockets import PlatformConnector
from loomserve.platform.state import ModelStatus
from loomserve.routers.in_flight import InFlight
from tests.unit.deployments.gateway.engines import replica_route
from tests.unit.platform.fleet.heartbeats import served_model

pytestmark = pytest.mark.anyio

ROUTE = ModelRoute(
    model=served_model("chat", 1),
    status=ModelStatus.READY, max_model_len=10,
    replicas=tuple(replica_route(id, address=id) for id in ("there", "gone")),
)  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engines:
    """What asks replicas, of which one of two answers."""

    def __init__(self, own: CollectorRegistry | None = None) -> None:
        """``own``: what it knows itself of the replica that answers."""
        self._own = own
        self.client = self

    def pages(self, model: str, replica_id: str) -> list[str]:
        if self._own is None or replica_id != "there":
            return []
        return [generate_latest(self._own).decode()]

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


async def test_any_front_end_shows_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    for folder in ("tmp", "sockets"):
        (tmp_path / folder).mkdir()
    labels = 'model="chat",replica="there",device="d"'
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=PlatformConnector())
        )
        pages = [await _front_end(number, session, stack) for number in (1, 2)]
        for page, others in pages:
            others.counts.look()
            shown = await _lines(page)
            assert [one for one in shown if one.startswith("blocks")] == ["blocks 7.0"]
            assert {one for one in shown if one.startswith("asked_total")} == {
                'asked_total{front_end="0"} 1.0',
                'asked_total{front_end="1"} 2.0',
            }
            assert {one for one in shown if one.startswith("tokens_total")} == {
                f'tokens_total{{{labels},front_end="0"}} 10.0',
                f'tokens_total{{{labels},front_end="1"}} 20.0',
            }
            running = [one for one in shown if one.startswith("running")]
            assert running == [f"running{{{labels}}} 5.0"]
        page, others = pages[0]
        silent = take_place(_SERVER)
        assert silent is not None
        others.counts.look()
        assert 'loomserve_scrape_up{front_end="2"} 0' in await _lines(page)
        silent.close()
        others.counts.look()
        assert not [one for one in await _lines(page) if 'front_end="2"' in one]


async def test_gateways_of_two_nodes_show_what_both_count_and_each_engine_once() -> None:
    on_two = ROUTE.replicas[0].model_copy(update={"node": "two"})
    route = ROUTE.model_copy(update={"replicas": (on_two,)})
    labels = 'model="chat",replica="there",device="d",node="two"'
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=PlatformConnector())
        )
        nodes = ("one", "two")
        pages = [
            await _front_end(number, session, stack, node=node)
            for number, node in enumerate(nodes, start=1)
        ]
        addresses = {others.address: node for (_, others), node in zip(pages, nodes, strict=True)}
        assert len(addresses) == 2, "sockets of two nodes may have no name in common"
        for page, _ in pages:
            page.routes = [route]
        for page, others in pages:
            others.elsewhere = {a: n for a, n in addresses.items() if a != others.address}
            shown = await _lines(page)
            assert {one for one in shown if one.startswith("asked_total")} == {
                'asked_total{front_end="one/0",node="one"} 1.0',
                'asked_total{front_end="two/0",node="two"} 2.0',
            }
            assert {one for one in shown if one.startswith("tokens_total")} == {
                f'tokens_total{{{labels},front_end="one/0"}} 10.0',
                f'tokens_total{{{labels},front_end="two/0"}} 20.0',
            }
            running = [one for one in shown if one.startswith("running")]
            assert running == [f"running{{{labels}}} 5.0"]
        page, others = pages[0]
        await pages[1][1].close()
        down = 'loomserve_scrape_up{front_end="two/0",node="two"} 0'
        assert down in await _lines(page)


_SERVER = Server(front_ends=2)


async def _front_end(
    number: int,
    session: aiohttp.ClientSession,
    stack: AsyncExitStack,
    *,
    node: str | None = None,
) -> tuple[MetricsPage, OtherGateways]:
    """One that has counted something, and listens on its own socket."""
    others = OtherGateways(
        take_place(_SERVER) if node is None else None,
        "token",
        "127.0.0.1",
        partial(_get, session),
        node_name=node,
    )
    stack.push_async_callback(others.close)
    platform, own, engine = (CollectorRegistry() for _ in range(3))
    Gauge("blocks", "Of the store.", registry=platform).set(7)
    Counter("asked", "Asked.", registry=own).inc(number)
    Counter("tokens", "Of an engine.", registry=engine).inc(10 * number)
    Gauge("running", "In an engine.", registry=engine).set(5)
    routes: Any = [ROUTE]
    engines: Any = Engines(engine)
    page = MetricsPage(platform, routes, engines, [], own=own, others=others)
    await others.listen(page.own_parts, _nothing)
    return page, others


async def _nothing() -> None: ...


async def _lines(page: MetricsPage) -> list[str]:
    response = await page.show(Request({"type": "http"}))
    return bytes(response.body).decode().splitlines()


async def _get(session: aiohttp.ClientSession, address: str, path: str, timeout_s: float) -> str:
    async with session.get(
        f"http://{address}{path}",
        headers={INTERNAL_TOKEN_HEADER: "token"},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    ) as response:
        return await response.text()
