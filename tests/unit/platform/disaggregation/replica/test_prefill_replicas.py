"""A decode replica's choice among prefill replicas, which here are small HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from loomserve.platform.disaggregation.replica import prefill_replicas
from loomserve.platform.disaggregation.replica.prefill_replicas import PrefillReplicas
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, PREFILL_PATH, LiveReplica
from loomserve.platform.run.sockets import listen_locally
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import PrefillAwayError, Role
from loomserve.routers.snapshot import RoutingStats


def peer(
    name: str,
    address: str,
    *,
    running: int = 0,
    role: Role = Role.PREFILL,
    draining: bool = False,
) -> LiveReplica:
    load = ReplicaLoad(running=running, waiting=0, kv_cache_usage=0, step_time_s=0, measured_at=0)
    stats = RoutingStats(
        load=load, max_running=8, kv_capacity_tokens=1000, draining=draining, role=role
    )
    return LiveReplica(id=name, address=address, stats=stats)


@asynccontextmanager
async def prefill_server(
    answer: Callable[[web.Request], object] | None = None,
) -> AsyncIterator[str]:
    """Echoes what it is sent, or answers as told; yields its address."""

    async def handle(request: web.Request) -> web.Response:
        assert request.headers[INTERNAL_TOKEN_HEADER] == "secret"
        if answer is not None:
            await answer(request)
        return web.Response(body=b"by " + await request.read())

    app = web.Application()
    app.router.add_post(PREFILL_PATH, handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    sock, address = listen_locally("prefill", "127.0.0.1")
    await web.SockSite(runner, sock).start()
    try:
        yield address
    finally:
        await runner.cleanup()


@asynccontextmanager
async def replicas() -> AsyncIterator[PrefillReplicas]:
    made = PrefillReplicas("secret", load_limit=1.6)
    try:
        yield made
    finally:
        await made.close()


NOWHERE = "nowhere.127.0.0.1"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_least_loaded_replica_that_prefills_and_does_not_drain_is_asked() -> None:
    async with prefill_server() as address, replicas() as some:
        some.set_replicas(
            [
                peer("decodes", NOWHERE, role=Role.DECODE),
                peer("drains", NOWHERE, draining=True),
                peer("busy", NOWHERE, running=5),
                peer("idle", address, running=1),
            ]
        )
        assert await some.prefill(b"x", 10) == b"by x"


async def test_without_a_prefill_replica_the_caller_is_told() -> None:
    async with replicas() as some:
        some.set_replicas([peer("decodes", NOWHERE, role=Role.DECODE)])
        with pytest.raises(PrefillAwayError, match="no prefill replica"):
            await some.prefill(b"x", 10)


async def test_one_that_failed_is_not_asked_again_until_the_controller_names_it_anew() -> None:
    async with prefill_server() as address, replicas() as some:
        both = [peer("dead", NOWHERE), peer("sound", address, running=1)]
        some.set_replicas(both)
        with pytest.raises(PrefillAwayError, match="dead"):
            await some.prefill(b"x", 10)
        assert await some.prefill(b"x", 10) == b"by x"
        some.set_replicas(both)
        with pytest.raises(PrefillAwayError, match="dead"):
            await some.prefill(b"x", 10)


async def test_an_error_of_the_replica_counts_as_a_failure() -> None:
    async def fail(request: web.Request) -> None:
        raise web.HTTPInternalServerError

    async with prefill_server(fail) as address, replicas() as some:
        some.set_replicas([peer("a", address)])
        with pytest.raises(PrefillAwayError, match="500"):
            await some.prefill(b"x", 10)


async def test_a_replica_that_hangs_is_waited_for_only_while_it_reports() -> None:
    reached = asyncio.Event()

    async def hang(request: web.Request) -> None:
        reached.set()
        await asyncio.sleep(60)

    async with prefill_server(hang) as address, replicas() as some:
        some.set_replicas([peer("hangs", address)])
        asked = asyncio.create_task(some.prefill(b"x", 10))
        await reached.wait()
        # A new role ends nothing that was begun.
        some.set_replicas([peer("hangs", address, role=Role.DECODE)])
        await asyncio.sleep(0.05)
        assert not asked.done()
        assert some.ledger.of("hangs").requests == 1
        some.set_replicas([])
        with pytest.raises(PrefillAwayError, match="reports no more"):
            await asked
        assert some.ledger.of("hangs").requests == 0


async def test_a_replica_that_is_stopped_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_replicas, "_ANSWER_TIMEOUT_S", 0.2)

    async def hang(request: web.Request) -> None:
        await asyncio.sleep(60)

    async with prefill_server(hang) as address, replicas() as some:
        some.set_replicas([peer("hangs", address)])
        async with asyncio.timeout(5):
            with pytest.raises(PrefillAwayError, match="replica hangs failed"):
                await some.prefill(b"x", 10)
        assert some.ledger.of("hangs").requests == 0


async def test_a_client_that_leaves_closes_the_connection_to_the_replica() -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> None:
        reached.set()
        try:
            await asyncio.sleep(60)
        finally:
            left.set()

    async with prefill_server(hang) as address, replicas() as some:
        some.set_replicas([peer("a", address)])
        asked = asyncio.create_task(some.prefill(b"x", 10))
        await reached.wait()
        asked.cancel()
        await asyncio.wait_for(left.wait(), 5)
