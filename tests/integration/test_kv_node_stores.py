"""Stores of nodes as Ray's actors: one a node, found again, started anew, told of each other."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.options import StorePlan, arena_path
from loomserve.kvstore.server.protocol import Inspect, StoreUsage
from loomserve.platform.base.errors import StartError
from loomserve.platform.state.kvstore import KvState
from tests.e2e.conftest import free_port
from tests.integration.ray_node import ray_node
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", name="ray_")
def _ray() -> Iterator[Any]:
    with ray_node("one") as running:
        yield running


def plan() -> StorePlan:
    return StorePlan(port=free_port(), memory=64 * 2**20)


def usage_of(address: str) -> KvState:
    with closing(StoreClient(address, timeout_ms=5000)) as client:
        return client.ask(Inspect(), StoreUsage).state


async def within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> None:
    until = time.monotonic() + seconds + PATIENCE_S
    while not await holds():
        assert time.monotonic() < until
        await asyncio.sleep(0.2)


def test_each_node_gets_a_store_that_outlives_who_started_it(ray_: Any) -> None:
    from loomserve.deployments.kvstore.node_stores import (
        NodeStores,
        ask_stores,
        living_places,
        stop_node_stores,
        store_actor_name,
    )

    asked = plan()
    ((ray_id, place),) = living_places().items()
    node = "one"
    assert place.name == node

    async def play() -> None:
        stores = NodeStores(asked, "token", 1)
        await stores.follow()
        (member,) = await stores.members()
        assert (member.node, member.address.host) == (node, place.host)
        options = asked.here(node)
        usage = await asyncio.to_thread(usage_of, options.address)
        assert usage.network is not None
        assert (usage.network.node, usage.network.peers) == (node, ())
        assert await ask_stores(Inspect(), StoreUsage) == {node: StoreUsage(usage)}
        assert await stores.problems() == {}
        # A controller that was started anew finds it.
        again = NodeStores(asked, "token", 2)
        await again.follow()
        assert list(await again.members()) == [member]
        actor = ray_.get_actor(store_actor_name(ray_id), "loomserve")
        pid = ray_.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGKILL)

        async def has_started_anew() -> bool:
            await again.follow()
            found: list[Member] = list(await again.members())
            return bool(found) and found[0].epoch != member.epoch

        await within(60, has_started_anew)
        assert arena_path(asked.port).exists()
        pid = ray_.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        await stop_node_stores(30.0)
        assert not arena_path(asked.port).exists()
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
        assert not psutil.pid_exists(pid)

    asyncio.run(play())


def test_a_store_that_cannot_start_says_why(ray_: Any, tmp_path: Path) -> None:
    from loomserve.deployments.kvstore.node_stores import start_node_stores, stop_node_stores

    (tmp_path / "foreign").mkdir(mode=0o700)
    (tmp_path / "foreign" / "file").touch()
    asked = plan().model_copy(update={"ssd": 2**30, "ssd_folder": tmp_path / "foreign"})

    try:
        with pytest.raises(StartError, match=r"node one cannot start: .* something else than"):
            start_node_stores(asked, "token")
    finally:
        asyncio.run(stop_node_stores(10.0))


def test_stores_are_there_before_engines_are(ray_: Any) -> None:
    from loomserve.deployments.kvstore.node_stores import start_node_stores, stop_node_stores

    asked = plan()
    start_node_stores(asked, "token")
    assert usage_of(asked.here().address).capacity_bytes == 64 * 2**20
    asyncio.run(stop_node_stores(30.0))
    assert not arena_path(asked.port).exists()
