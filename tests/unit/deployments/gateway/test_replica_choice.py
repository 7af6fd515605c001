"""Replicas chosen for requests whose front end is in the gateway's process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.load_reports import LoadReports
from loomserve.deployments.gateway.replica_choice import AnswerContext, ReplicaChoice
from loomserve.platform.base.errors import TooManyRequests, Unavailable
from loomserve.platform.config import Router
from loomserve.platform.fleet.messages import LOAD_PATH
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.platform.state.load_report import LoadReport
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.prefix_index import BLOCK_TOKENS
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.unit.routers.tables import reported


def stats(
    waiting: int = 0, *, running: int = 1, most: int = 1, draining: bool = False
) -> RoutingStats:
    return RoutingStats(
        load=ReplicaLoad(
            running=running,
            waiting=waiting,
            kv_cache_usage=0.1,
            step_time_s=0.1,
            pace=Pace(prefill_token_s=0.1, output_token_s=0.1, request_s=10),
            measured_at=time.monotonic(),
        ),
        max_running=most,
        kv_capacity_tokens=10_000,
        draining=draining,
        role=Role.UNIFIED,
        told_at=0.0,
    )


class Bench:
    def __init__(self, router: Router | None = None, **loads: RoutingStats | None) -> None:
        self.ledger = InFlight()
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics(self.registry)
        self.metrics.set_models({"m": list(loads)})
        self.table = reported(self.ledger, loads)
        self.choice = ReplicaChoice("m", router or Router(), self.ledger, self.metrics, self.table)

    def routing(self, *candidates: str, **given: Any) -> RoutingRequest:
        return RoutingRequest(
            "id", "id", [1, 2, 3], 16, frozenset(candidates or self.table.ids), **given
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model": "m", **labels})


def context(**given: Any) -> AnswerContext:
    content = EngineRequest("/v1/completions", {"model": "m", "prompt": "a"})
    return AnswerContext(request=ModelRequest("m", content, "id", **given))


def test_a_request_is_booked_on_the_least_loaded_replica_until_it_leaves() -> None:
    bench = Bench(busy=stats(waiting=5), idle=stats())
    routing = bench.routing()
    assert bench.choice.choose(routing) == "idle"
    assert bench.ledger.of("idle").requests == 1
    assert bench.value("loomserve_requests_in_flight", replica="idle") == 1
    bench.choice.left(routing, "idle")
    bench.choice.left(routing, "idle")
    assert bench.ledger.of("idle").requests == 0
    assert bench.value("loomserve_requests_in_flight", replica="idle") == 0


def test_a_request_may_wait_at_its_engine_as_long_as_requests_do_there() -> None:
    bench, asked = Bench(one=stats(waiting=1)), context()
    routing = bench.routing(context=asked)
    assert not asked.may_wait
    assert bench.choice.choose(routing) == "one"
    assert asked.may_wait
    bench.table.report("one", stats(waiting=0))
    assert not asked.may_wait
    bench.table.report("one", stats(waiting=1))
    bench.choice.left(routing, "one")
    assert not asked.may_wait


@pytest.mark.parametrize(
    ("expected", "allowed", "booked"),
    [(30.0, 500, 30), (None, 500, 256), (None, 50, 50), (300.0, 50, 50), (None, None, 256)],
)
def test_an_answer_is_booked_as_long_as_predicted_or_usual_and_never_longer_than_allowed(
    expected: float | None, allowed: int | None, booked: int
) -> None:
    bench = Bench(one=stats())
    asked = context(expected_tokens=expected)
    routing = RoutingRequest("id", "id", [1, 2, 3], allowed, frozenset({"one"}), context=asked)
    assert bench.choice.choose(routing) == "one"
    assert bench.ledger.of("one").tokens == 3 + booked


def test_prompts_that_begin_alike_go_to_one_replica_also_when_they_are_sent_on() -> None:
    story = list(range(10 * BLOCK_TOKENS))
    bench = Bench(Router(policy="prefix_aware"), **{name: stats(most=10) for name in "abc"})

    def sent(tokens: list[int], *candidates: str, salt: str | None = None) -> str | None:
        among = frozenset(candidates or bench.table.ids)
        routing = RoutingRequest("id", "id", tokens, 16, among, cache_salt=salt)
        chosen = bench.choice.choose(routing)
        if chosen is not None:
            bench.choice.left(routing, chosen)
        return chosen

    first = sent(story)
    assert first is not None
    bench.table.report(first, stats(running=2, most=10))
    assert {sent([*story, number]) for number in range(5)} == {first}
    assert sent([*story, 1], salt="another tenant's") != first
    others = bench.table.known_ids - {first}
    second = sent([*story, 1, 2], *others)
    assert second in others
    assert {sent([*story, number], *others) for number in range(5)} == {second}


def test_only_candidates_are_chosen_and_none_that_drains() -> None:
    bench = Bench(one=stats(), two=stats(waiting=9), three=stats(draining=True))
    assert bench.choice.choose(bench.routing("two", "three")) == "two"
    assert bench.choice.choose(bench.routing("three")) is None


def test_a_replica_whose_engine_ended_with_it_is_chosen_only_if_there_is_no_other() -> None:
    bench = Bench(one=stats(), two=stats(waiting=9), three=stats())
    ended = frozenset({"one"})
    assert bench.choice.choose(bench.routing("one", "two", exclude=ended)) == "two"
    assert bench.choice.choose(bench.routing("one", exclude=ended)) == "one"


def test_a_request_that_waits_is_counted_until_it_goes_on() -> None:
    bench = Bench(one=stats(draining=True))
    waiting = context()
    for _ in range(2):
        assert bench.choice.choose(bench.routing(context=waiting)) is None
        assert bench.value("loomserve_gateway_queue") == 1
    bench.table.report("one", stats())
    assert bench.choice.choose(bench.routing(context=waiting)) == "one"
    assert bench.value("loomserve_gateway_queue") == 0


def test_a_pinned_request_waits_for_nobody_and_is_carried_on_by_others() -> None:
    bench = Bench(one=stats(), two=stats(waiting=9))
    pinned = context(pinned_to="two")
    assert bench.choice.choose(bench.routing(context=pinned)) == "two"
    with pytest.raises(Unavailable):
        bench.choice.choose(bench.routing("one", context=pinned))
    assert bench.choice.choose(bench.routing("one", context=pinned, attempt=1)) == "one"


def test_a_request_that_will_be_late_is_refused_once_and_leaves_nothing_booked() -> None:
    bench = Bench(one=stats(waiting=50))
    late = context(median_tokens=100.0, refuse_after=time.monotonic() + 0.1)
    with pytest.raises(TooManyRequests):
        bench.choice.choose(bench.routing(context=late))
    assert bench.ledger.of("one").requests == 0
    # What has begun is carried on.
    assert bench.choice.choose(bench.routing(context=late, attempt=1)) == "one"


def test_loads_are_asked_of_each_replica_and_forgotten_with_it() -> None:
    asked: list[tuple[str, str]] = []

    async def get(address: str, path: str, timeout_s: float) -> str:
        asked.append((address, path))
        if address == "gone":
            raise TimeoutError
        return stats(waiting=3).model_dump_json()

    async def run() -> None:
        table = ReplicaTable(InFlight(), stale_after_s=10.0)
        reports = LoadReports(get, table)
        reports.set_replicas({"a": "there", "b": "gone"})
        assert (table.ids, table.role("a"), table.role("b")) == (("a", "b"), None, None)
        await asyncio.sleep(0.05)
        load = table.replica(0).load
        assert load is not None
        assert load.waiting == 3
        assert table.replica(1).load is None
        assert set(asked) == {("there", LOAD_PATH), ("gone", LOAD_PATH)}
        reports.set_replicas({"a": "elsewhere", "b": "gone"})
        assert (table.ids, table.replica(0).load) == (("a", "b"), None)
        reports.set_replicas({"b": "gone"})
        assert table.ids == ("b",)
        reports.close()
        assert table.ids == ()

    asyncio.run(run())


def test_a_load_that_was_told_is_newer_than_one_asked_for_before() -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def get(address: str, path: str, timeout_s: float) -> str:
        report = stats(waiting=3, running=2).model_dump_json()
        asked.set()
        await answers.wait()
        return report

    async def run() -> None:
        table = ReplicaTable(InFlight(), stale_after_s=10.0)
        reports = LoadReports(get, table)
        load = LoadReport(steps=1, counted=0, running=8, waiting=0, kv_usage=0.5)
        reports.pushed("a", load, 1.0)
        assert table.ids == ()
        reports.set_replicas({"a": "there"})
        await asked.wait()
        reports.pushed("a", load, counted_until=2.0)
        # How much an engine takes at once only its replica says.
        assert table.replica(0).load is None
        answers.set()
        await asyncio.sleep(0.05)
        known = table.replica(0).load
        assert known is not None
        assert known.pace is not None
        assert (known.running, known.waiting, known.measured_at) == (8, 0, 2.0)
        reports.pushed("a", load._replace(running=9), counted_until=3.0)
        later = table.replica(0).load
        assert later is not None
        assert (later.running, later.measured_at) == (9, 3.0)
        reports.close()

    asyncio.run(run())


def test_one_that_has_not_given_its_first_answer_gets_that_request_alone() -> None:
    bench = Bench(a=stats(), b=stats(waiting=5))
    bench.choice.untried = lambda: frozenset({"a"})
    assert bench.choice.choose(bench.routing(context=context())) == "b"
    first = context(pinned_to="a", is_first=True)
    assert bench.choice.choose(bench.routing(context=first)) == "a"
    bench.choice.untried = lambda: frozenset({"a", "b"})
    assert bench.choice.choose(bench.routing(context=context())) is None
