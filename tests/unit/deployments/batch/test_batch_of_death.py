"""Batches whose lines end engines: the lane, a gateway's endpoint, and a front end's rules."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loomserve.deployments.batch.executor import outcome
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.batch.executor import LineAnswer, LineCall
from loomserve.platform.batch.policy.objects import BatchStatus
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import ModelRoute, ServedModel
from loomserve.platform.front_end.engine.request_book import lost_request
from loomserve.platform.front_end.policy.continuation import (
    Action,
    ContinuationBounds,
    Death,
    Loss,
    RequestView,
    next_action,
)
from loomserve.platform.http.engine_errors import no_replica
from loomserve.platform.requests.query_of_death import QueriesOfDeath
from loomserve.platform.state import ModelStatus, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats
from tests.unit.deployments.gateway.engines import Answer, FakeEngines, answered
from tests.unit.platform.batch.test_lane import ALICE, Bench, hurry, request
from tests.unit.platform.fleet.heartbeats import served_model

KILLS = "kill"
BOUNDS = ContinuationBounds()
KEYS = (ApiKey(name=ALICE, hash="sha256:" + "0" * 64),)
ANSWER = json.dumps({"usage": {"prompt_tokens": 4, "completion_tokens": 2}}).encode()
ROUTE = ModelRoute(
    model=served_model(most=1),
    status=ModelStatus.READY,
    max_model_len=1024,
    replicas=(),
)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


class Engine:
    """It computes a line in a while, if none of those that it has ends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()

    async def computes(self, prompt: str) -> bool:
        """Whether it has; it may have ended."""
        if KILLS in prompt:
            self.ended.set()
        # Long enough that lines of several batches are there when it ends.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), 0.02)
        return not self.ended.is_set()


class Platform:
    """An executor of lines through a gateway; an engine that ended is replaced by a new one."""

    def __init__(self, count: int) -> None:
        self.names = (f"e{n}" for n in itertools.count(1))
        self.engines: list[Engine] = []
        self.deaths = 0
        self.deadly = QueriesOfDeath(time.monotonic)
        self.count = count
        self.replace_ended()
        routes: Any = self
        server = Server(api_keys=KEYS)
        meter = TokenMeter(KeyMetrics(CollectorRegistry()), Path("/nowhere"))
        self.endpoint = LineEndpoint(
            *(server, LiveKeys(server), meter, routes, FakeEngines(self.answer)),
            isolates_tenants=False,
        )

    def replace_ended(self) -> None:
        living = [engine for engine in self.engines if not engine.ended.is_set()]
        self.deaths += len(self.engines) - len(living)
        self.engines = living + [Engine(next(self.names)) for _ in range(self.count - len(living))]

    async def answer(self, request: ModelRequest) -> Answer:
        """As a front end does: it sends a line on, but not to all engines."""
        digest = request.content.encoded
        if len(self.deadly.replicas(digest)) >= BOUNDS.most_suspected:
            return self._lost(request, Action.END_SUSPECT)
        deaths: list[Death] = []
        engine = next((one for one in self.engines if one.name == request.pinned_to), None)
        if engine is None:
            return no_replica("m")
        while True:
            engine = engine or self.engines[0]
            if await engine.computes(request.content.fields["prompt"]):
                self.deadly.answered(digest)
                return answered(ANSWER)
            self.replace_ended()
            self.deadly.ended(digest, engine.name)
            deaths.append(Death(0))
            view = RequestView(deaths=deaths, carried_on=request.carried_on)
            decided = next_action(view, Loss.GONE, others=True, now=0, bounds=BOUNDS)
            if decided is not Action.GO_ON:
                return self._lost(request, decided)
            engine = None

    def _lost(self, request: ModelRequest, why: Action) -> Answer:
        return lost_request(why, "m", request.request_id).error

    def choose(self, fields: object, key: object, preferred: str | None) -> ModelRoute:
        return ROUTE

    async def models(self) -> Mapping[str, ServedModel]:
        load = ReplicaLoad(
            running=0, waiting=0, kv_cache_usage=0, step_time_s=0.01, measured_at=time.monotonic()
        )
        stats = RoutingStats(
            load=load,
            max_running=16,
            kv_capacity_tokens=100_000,
            draining=False,
            role=Role.UNIFIED,
            told_at=0.0,
        )
        return {"m": ServedModel(max_model_len=1024, engines={e.name: stats for e in self.engines})}

    async def execute(self, call: LineCall) -> LineAnswer:
        status, body = await self.endpoint.complete(call.model_copy(update={"timeout_s": 30}))
        return LineAnswer(outcome(status, body), status, body)


@asynccontextmanager
async def platform(path: Path, engines: int) -> AsyncIterator[tuple[Platform, Bench]]:
    made = Platform(engines)
    executor: Any = made
    bench = Bench(path / "b", executor)
    async with bench.running():
        yield made, bench


def lines(count: int, prompt: Callable[[int], str]) -> str:
    return "".join(request(f"c{n}", prompt=prompt(n)) + "\n" for n in range(count))


@pytest.mark.anyio
@pytest.mark.parametrize("engines", [1, 2, 4])
async def test_a_batch_of_killing_lines_is_stopped_after_three_engines_and_others_go_on(
    tmp_path: Path, engines: int
) -> None:
    async with platform(tmp_path, engines) as (made, bench):
        harmless = [bench.submit(lines(30, lambda n: f"a{n}"))]
        deadly = bench.submit(lines(40, lambda n: f"{KILLS}{n}"))
        harmless.append(bench.submit(lines(30, lambda n: f"b{n}")))
        stopped = await bench.ended(deadly)
        for batch_id in harmless:
            batch = await bench.ended(batch_id)
            assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 30)
        assert stopped.status is BatchStatus.FAILED
        assert [error.code for error in stopped.errors or ()] == ["engines_ended"]
        assert 1 <= made.deaths <= 3
        later = await bench.ended(bench.submit(lines(10, lambda n: f"c{n}")))
        assert later.completed == 10
        assert made.deaths <= 3


@pytest.mark.anyio
async def test_one_killing_line_among_many_fails_alone(tmp_path: Path) -> None:
    async with platform(tmp_path, 2) as (made, bench):
        batch_id = bench.submit(lines(60, lambda n: KILLS if n == 33 else f"p{n}"))
        batch = await bench.ended(batch_id)
        assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 59, 1)
        (line,) = bench.lines_of(batch.error_file_id)
        assert line["custom_id"] == "c33"
        assert line["response"]["body"]["error"]["code"] == "query_of_death"
        assert made.deaths == 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
