"""The routers inside a real Ray Serve: its router classes are private, so they are proven here."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from loomserve.platform.config import Router
from loomserve.routers.block_keys import text_keys
from loomserve.routers.in_flight import NOTHING, Assigned, InFlight
from loomserve.routers.serve.choice import request_router_config
from loomserve.routers.ticket import RoutingTicket

IN_FLIGHT = InFlight()


class Echo:
    """Reports the load that the test writes for it."""

    def __init__(self, reports: str) -> None:
        self._reports = Path(reports)

    def record_routing_stats(self) -> dict[str, Any]:
        mine = serve.get_replica_context().replica_id.unique_id
        reports = json.loads(self._reports.read_text())
        if mine not in reports:
            return {}
        stats: dict[str, Any] = reports[mine]
        return stats | {"load": stats["load"] | {"measured_at": time.monotonic()}}

    def __call__(self, word: str) -> str:
        return word


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Workers cannot import this file, so Echo travels by value.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        namespace=f"test-serve-router-{uuid.uuid4().hex}",
    )
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


def run(policy: str, folder: Path) -> tuple[DeploymentHandle, Path]:
    """Two replicas behind a router, and the file of their reports by replica id."""
    reports = folder / "reports.json"
    reports.write_text("{}")
    config = RequestRouterConfig(
        **request_router_config(Router.model_validate({"policy": policy}), f"the {policy} model")
    )
    deployment = serve.deployment(
        num_replicas=2, request_router_config=config, ray_actor_options={"num_cpus": 0.1}
    )(Echo)
    return serve.run(deployment.bind(str(reports)), name=policy, route_prefix=None), reports


@pytest.fixture(scope="module")
def load_aware(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeploymentHandle, Path]:
    return run("load_aware", tmp_path_factory.mktemp("load_aware"))


@asynccontextmanager
async def routed(handle: DeploymentHandle, **asked: Any) -> AsyncIterator[str]:
    """A request as the gateway makes it: open while the block runs."""
    with RoutingTicket(IN_FLIGHT, **asked) as ticket:
        async with (
            asyncio.timeout(60),  # the first one waits for the router to start
            handle.choose_replica(ticket, _reserve=False) as selection,
        ):
            replica_id = selection.replica_id
        assert ticket.replica is not None
        assert ticket.replica.id == replica_id
        yield replica_id


async def two_replicas(handle: DeploymentHandle) -> tuple[str, str]:
    async with routed(handle) as first, routed(handle, exclude=frozenset({first})) as second:
        return first, second


async def running(handle: DeploymentHandle, replica_id: str) -> int | None:
    """Requests that a replica reports, as the router sees it; None: no report has reached it."""
    with RoutingTicket(IN_FLIGHT, pinned_to=replica_id) as ticket:
        async with asyncio.timeout(60), handle.choose_replica(ticket, _reserve=False):
            pass
    assert ticket.replica is not None
    return None if ticket.replica.load is None else ticket.replica.load.running


def stats(running: int, *, draining: bool = False) -> dict[str, Any]:
    return {
        "load": {"running": running, "waiting": 0, "kv_cache_usage": 0.0, "step_time_s": 0.01},
        "max_running": 10,
        "kv_capacity_tokens": 1_000,
        "draining": draining,
        "role": "unified",
    }


async def until(expected: object, ask: Callable[[], Awaitable[object]]) -> None:
    """Reports take a second or two to reach the router."""
    deadline = time.monotonic() + 10
    while (seen := await ask()) != expected:
        assert time.monotonic() < deadline, f"{seen} instead of {expected}"
        await asyncio.sleep(0.1)


def test_a_burst_that_arrives_at_once_is_spread(load_aware: tuple[DeploymentHandle, Path]) -> None:
    handle, _ = load_aware

    async def burst() -> None:
        everyone = asyncio.Barrier(9)

        async def one() -> str:
            async with routed(handle, prompt_tokens=10, output_tokens=5) as replica_id:
                await everyone.wait()
                await everyone.wait()
                return replica_id

        requests = [asyncio.create_task(one()) for _ in range(8)]
        await everyone.wait()
        open_now = {id: IN_FLIGHT.of(id) for id in IN_FLIGHT.replicas()}
        await everyone.wait()
        taken = Counter(await asyncio.gather(*requests))
        assert sorted(taken.values()) == [4, 4]
        assert {id: open_now[id] for id in taken} == {id: Assigned(4, 60) for id in taken}
        assert {IN_FLIGHT.of(id) for id in taken} == {NOTHING}

    asyncio.run(burst())
    decisions = IN_FLIGHT.decisions()
    assert {key[:2] for key in decisions} == {("the load_aware model", "load_aware")}
    assert decisions.total() == 8


def test_reports_exclusion_and_draining_steer_requests(
    load_aware: tuple[DeploymentHandle, Path],
) -> None:
    handle, reports = load_aware

    async def steer() -> None:
        a, b = await two_replicas(handle)

        async def pick(**asked: Any) -> str:
            async with routed(handle, **asked) as replica_id:
                return replica_id

        for idle, busy in ((a, b), (b, a)):
            reports.write_text(json.dumps({idle: stats(0), busy: stats(9)}))
            await until(idle, pick)
            assert await pick(exclude=frozenset({idle})) == busy
            assert await pick(pinned_to=busy) == busy

        reports.write_text(json.dumps({a: stats(9), b: stats(0, draining=True)}))
        await until(a, pick)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pick(exclude=frozenset({a}))
        assert (IN_FLIGHT.of(a), IN_FLIGHT.of(b)) == (NOTHING, NOTHING)

        assert await handle.remote("a call through Serve") == "a call through Serve"

        async def waiting() -> str:
            return await pick(exclude=frozenset({a}))

        later = asyncio.create_task(waiting())
        reports.write_text(json.dumps({a: stats(9), b: stats(0)}))
        assert await later == b

    asyncio.run(steer())


def test_prefixes_stay_together_until_loads_differ_too_much(tmp_path: Path) -> None:
    handle, reports = run("prefix_aware", tmp_path)

    async def prefixes() -> None:
        a, b = await two_replicas(handle)

        async def pick(prompt: str, salt: str | None = None, **asked: Any) -> str:
            keys = partial(text_keys, prompt.encode(), model="m", salt=salt)
            async with routed(handle, prompt_tokens=400, hash_prompt=keys, **asked) as replica_id:
                return replica_id

        async def report(loads: dict[str, dict[str, Any]]) -> None:
            reports.write_text(json.dumps(loads))
            for id_, told in loads.items():
                await until(told["load"]["running"], partial(running, handle, id_))

        by_prefix = ("the prefix_aware model", "prefix_aware", "prefix")
        story = "Once upon a time there was a weaver who sang. " * 35
        home = await pick(story, "alice")
        other = b if home == a else a
        await report({home: stats(4), other: stats(0)})
        earlier = IN_FLIGHT.decisions()[by_prefix]
        assert {await pick(f"{story} She had {i} looms.", "alice") for i in range(8)} == {home}
        assert IN_FLIGHT.decisions()[by_prefix] == earlier + 8
        assert await pick(story, "bob") == other
        assert await pick(story) == other
        assert await pick(story, "alice", exclude=frozenset({home})) == other
        assert await handle.remote("a call through Serve") == "a call through Serve"

        reports.write_text(json.dumps({home: stats(0), other: stats(0, draining=True)}))
        await until(home, lambda: pick(story, "bob"))  # which the other one has, but it drains

        story = "Another story, of a smith. " * 60
        await report({home: stats(0), other: stats(4)})
        assert await pick(story, "alice") == home
        await report({home: stats(40), other: stats(0)})
        assert await pick(f"{story} He left.", "alice") == other

    asyncio.run(prefixes())
    reasons = {
        reason for model, _, reason in IN_FLIGHT.decisions() if model == "the prefix_aware model"
    }
    assert reasons == {"prefix", "least_loaded", "only_candidate"}
