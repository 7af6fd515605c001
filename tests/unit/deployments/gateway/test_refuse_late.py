"""A request that is predicted to miss its deadline is refused before an engine sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.forward import (
    CollectedAnswer,
    Forwarder,
    ForwardRequest,
    never_gone,
)
from loomserve.platform.base.errors import TooManyRequests, Unavailable
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.routers.base import Replica
from loomserve.routers.ticket import RoutingTicket

LOAD = ReplicaLoad(
    running=4,
    waiting=4,
    kv_cache_usage=0.5,
    step_time_s=0.1,
    pace=Pace(prefill_token_s=0.01, output_token_s=0.1, request_s=8.0),
    measured_at=0.0,
)
# 5 of 4 places have to become free, one every 2 s; then an answer of 30 tokens takes 3 s.
BUSY = Replica("r1", LOAD, max_running=4)
# Its two bytes count as no token of a prompt.
REQUEST = EngineRequest("/v1/completions", {"max_tokens": 500}, b"{}")


class Handle:
    """Serve's handle of a model with one replica, where nobody listens."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.tickets: list[RoutingTicket] = []

    @asynccontextmanager
    async def choose_replica(
        self, ticket: RoutingTicket, _reserve: bool
    ) -> AsyncIterator[SimpleNamespace]:
        self.tickets.append(ticket)
        ticket.book(self.replica)
        assert ticket.ledger.of(self.replica.id).requests == 1
        address = {"address": "nowhere.127.0.0.1"}
        yield SimpleNamespace(replica_id=self.replica.id, replica_metadata=address)


def forward(replica: Replica, within_s: float | None, expected: float | None = 30.0) -> Handle:
    handle: Any = Handle(replica)

    async def run() -> None:
        registry = CollectorRegistry()
        metrics = GatewayMetrics(registry)
        metrics.set_models({"chat": ["r1"]})
        forwarder = Forwarder("token", metrics, idle_timeout_s=60)
        request = ForwardRequest(
            model="chat",
            content=REQUEST,
            request_id="1",
            expected_tokens=expected,
            refuse_after=None if within_s is None else time.monotonic() + within_s,
        )
        try:
            await forwarder.forward(request, handle, never_gone, CollectedAnswer().send)
        finally:
            await forwarder.close()
            refused = registry.get_sample_value("loomserve_refused_late_total", {"model": "chat"})
            handle.refused = refused

    try:
        asyncio.run(run())
    finally:
        assert handle.tickets[0].ledger.of("r1").requests == 0, "nothing stays booked"
    return handle  # type: ignore[no-any-return]


def test_it_is_told_when_to_come_back() -> None:
    with pytest.raises(TooManyRequests, match=r"13\.0 s, of which it waits 10\.0 s") as refused:
        forward(BUSY, within_s=8.0)
    assert refused.value.headers() == {"Retry-After": "10"}
    error = refused.value.body()["error"]
    assert (error["code"], error["param"]) == ("deadline_unreachable", "x-slo-ms")


@pytest.mark.parametrize(
    ("replica", "within_s", "expected"),
    [
        (BUSY, 60.0, 30.0),
        (BUSY, None, 30.0),
        (BUSY, 8.0, None),
        (Replica("r1"), 8.0, 30.0),
    ],
    ids=["in time", "not asked for", "no prediction", "unknown load"],
)
def test_all_others_go_to_their_engine(
    replica: Replica, within_s: float | None, expected: float | None
) -> None:
    # It was tried: nobody listens there.
    with pytest.raises(Unavailable, match="being restarted"):
        forward(replica, within_s, expected)


def test_the_router_counts_on_what_is_predicted_and_else_on_what_is_allowed() -> None:
    for expected, tokens in ((30.5, 31), (None, 500)):
        handle = Handle(BUSY)
        with pytest.raises(Unavailable):
            _forward_through(handle, expected)
        assert handle.tickets[0].output_tokens == tokens


def _forward_through(handle: Any, expected: float | None) -> None:
    async def run() -> None:
        forwarder = Forwarder("token", GatewayMetrics(CollectorRegistry()), idle_timeout_s=60)
        request = ForwardRequest(
            model="chat", content=REQUEST, request_id="1", expected_tokens=expected
        )
        try:
            await forwarder.forward(request, handle, never_gone, CollectedAnswer().send)
        finally:
            await forwarder.close()

    asyncio.run(run())
