"""A request that is predicted to miss its deadline is refused before an engine sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.replica_choice import AnswerContext, ReplicaChoice
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import Router
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.snapshot import RoutingStats
from tests.unit.routers.tables import reported


def busy() -> RoutingStats:
    """5 of 4 places have to become free, one every 2 s; then an answer of 30 tokens takes 3 s."""
    load = ReplicaLoad(
        running=4,
        waiting=4,
        kv_cache_usage=0.5,
        step_time_s=0.1,
        pace=Pace(prefill_token_s=0.01, output_token_s=0.1, request_s=8.0),
        measured_at=time.monotonic(),
    )
    return RoutingStats(
        load=load,
        max_running=4,
        kv_capacity_tokens=1000,
        draining=False,
        role=Role.UNIFIED,
        told_at=0.0,
    )


class Choice:
    """One request, for which there is one replica."""

    def __init__(self, load: RoutingStats | None) -> None:
        self.registry, self.ledger = CollectorRegistry(), InFlight()
        metrics = GatewayMetrics(self.registry)
        metrics.set_models({"chat": ["r1"]})
        table = reported(self.ledger, {"r1": load})
        self.choice = ReplicaChoice("chat", Router(), self.ledger, metrics, table)

    def choose(self, within_s: float | None, median: float | None = 30.0) -> str | None:
        content = EngineRequest("/v1/completions", {"max_tokens": 500}, b"{}")
        request = ModelRequest(
            model="chat",
            content=content,
            request_id="1",
            median_tokens=median,
            refuse_after=None if within_s is None else time.monotonic() + within_s,
        )
        context = AnswerContext(request=request)
        routing = RoutingRequest("1", "1", [], 500, frozenset({"r1"}), context=context)
        return self.choice.choose(routing)

    @property
    def refused(self) -> float | None:
        return self.registry.get_sample_value("loomserve_refused_late_total", {"model": "chat"})


def test_it_is_told_when_to_come_back() -> None:
    made = Choice(busy())
    with pytest.raises(TooManyRequests, match=r"13\.0 s, of which it waits 10\.0 s") as refused:
        made.choose(within_s=8.0)
    assert refused.value.headers() == {"Retry-After": "10"}
    error = refused.value.body()["error"]
    assert (error["code"], error["param"]) == ("deadline_unreachable", "x-slo-ms")
    assert made.refused == 1
    assert made.ledger.of("r1").requests == 0, "nothing stays booked"


@pytest.mark.parametrize(
    ("load", "within_s", "median"),
    [
        (busy, 60.0, 30.0),
        (busy, None, 30.0),
        (busy, 8.0, None),
        (lambda: None, 8.0, 30.0),
    ],
    ids=["in time", "not asked for", "no prediction", "unknown load"],
)
def test_all_others_go_to_their_engine(
    load: Callable[[], RoutingStats | None], within_s: float | None, median: float | None
) -> None:
    made = Choice(load())
    assert made.choose(within_s, median) == "r1"
    assert made.refused == 0
