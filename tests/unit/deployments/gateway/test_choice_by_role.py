"""Replicas for requests of front ends in the gateway, and for their prompts."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.replica_choice import AnswerContext, ReplicaChoice
from loomserve.platform.base.errors import TooManyRequests, Unavailable
from loomserve.platform.config import Router
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.snapshot import RoutingStats
from tests.unit.routers.tables import reported


def stats(role: Role, *, draining: bool = False) -> RoutingStats:
    # It needs 10 s for an answer.
    load = ReplicaLoad(
        running=0,
        waiting=0,
        kv_cache_usage=0.0,
        step_time_s=0.1,
        pace=Pace(prefill_token_s=0.0, output_token_s=0.1, request_s=10.0),
        measured_at=time.monotonic(),
    )
    return RoutingStats(
        load=load,
        max_running=4,
        kv_capacity_tokens=1000,
        draining=draining,
        role=role,
        told_at=0.0,
    )


class Choice:
    def __init__(self, **request: Any) -> None:
        self.registry = CollectorRegistry()
        metrics = GatewayMetrics(self.registry)
        metrics.set_models({"chat": ["p", "d"]})
        self.ledger = InFlight()
        self.table = reported(self.ledger, {"p": stats(Role.PREFILL), "d": stats(Role.DECODE)})
        self.choice = ReplicaChoice("chat", Router(), self.ledger, metrics, self.table)
        content = EngineRequest("/v1/completions", {"max_tokens": 500}, b"{}")
        self.context = AnswerContext(
            request=ModelRequest(model="chat", content=content, request_id="1", **request)
        )

    def asks(self, *candidates: str, prompt_only: bool = False, attempt: int = 0) -> RoutingRequest:
        return RoutingRequest(
            request_id="1",
            external_id="1",
            prompt_token_ids=[1] * 100,
            max_tokens=1 if prompt_only else 50,
            candidates=frozenset(candidates),
            prompt_only=prompt_only,
            attempt=attempt,
            context=self.context,
        )

    @property
    def waiting(self) -> float | None:
        return self.registry.get_sample_value("loomserve_gateway_queue", {"model": "chat"})


def test_a_request_is_booked_where_it_is_answered_and_where_its_prompt_is_computed() -> None:
    made = Choice()
    answers, prompt = made.asks("p", "d"), made.asks("p", prompt_only=True)
    assert made.choice.choose(answers) == "d"
    assert made.choice.choose(prompt) == "p"
    assert (made.ledger.of("d").tokens, made.ledger.of("p").tokens) == (150, 101)
    made.choice.left(prompt, "p")
    assert (made.ledger.of("d").requests, made.ledger.of("p").requests) == (1, 0)
    made.choice.left(answers, "d")
    assert made.ledger.of("d").requests == 0


def test_a_request_that_is_pinned_may_have_its_prompt_computed_elsewhere() -> None:
    made = Choice(pinned_to="d")
    assert made.choice.choose(made.asks("p", "d")) == "d"
    assert made.choice.choose(made.asks("p", prompt_only=True)) == "p"
    with pytest.raises(Unavailable):
        made.choice.choose(made.asks("p"))
    assert made.choice.choose(made.asks("p", attempt=1)) == "p"


def test_a_prompt_for_which_nobody_is_there_is_not_counted_as_waiting() -> None:
    made = Choice()
    made.table.report("p", stats(Role.PREFILL, draining=True))
    assert made.choice.choose(made.asks("p", prompt_only=True)) is None
    assert not made.waiting
    assert made.choice.choose(made.asks("p")) is None
    assert made.waiting == 1


def test_only_the_answer_can_be_late() -> None:
    made = Choice(median_tokens=50.0, refuse_after=time.monotonic() + 1)
    assert made.choice.choose(made.asks("p", prompt_only=True)) == "p"
    assert made.choice.choose(made.asks("d", attempt=1)) == "d"
    with pytest.raises(TooManyRequests):
        made.choice.choose(made.asks("d"))
