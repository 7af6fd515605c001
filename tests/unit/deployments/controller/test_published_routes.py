"""Whoever has changed something may ask any gateway for it."""

from __future__ import annotations

import asyncio
import time

import pytest

from loomserve.deployments.controller import published_routes
from loomserve.deployments.controller.published_routes import PublishedRoutes
from loomserve.platform.fleet.messages import Routes
from tests.waiting import PATIENCE_S

_NONE = -1


def _next(routes: PublishedRoutes, node: str) -> Routes:
    return routes.current.model_copy(update={"drained_nodes": (node,)})


async def _follow(routes: PublishedRoutes, gateway: str, seen: list[int], delay_s: float) -> None:
    version = _NONE
    while True:
        version = (await routes.watch(version, gateway)).version
        await asyncio.sleep(delay_s)
        seen.append(version)


def test_a_change_is_waited_for_until_each_gateway_answers_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whoever is waited for is waited for until it has answered.
    monkeypatch.setattr(published_routes, "_TAKEN_TIMEOUT_S", 3 * PATIENCE_S)

    async def scenario() -> None:
        routes = PublishedRoutes(1)
        seen: dict[str, list[int]] = {"quick": [], "slow": []}
        await routes.publish(_next(routes, "a"))
        following = [
            asyncio.create_task(_follow(routes, name, seen[name], delay_s))
            for name, delay_s in (("quick", 0.0), ("slow", 0.2))
        ]
        await asyncio.sleep(0.3)
        for node in ("b", "c"):
            await routes.publish(_next(routes, node))
            await routes.taken()
            assert [each[-1] for each in seen.values()] == [routes.current.version] * 2
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        # Those that have ended keep nobody.
        await routes.publish(_next(routes, "d"))
        await asyncio.wait_for(routes.taken(), PATIENCE_S)

    asyncio.run(scenario())


def test_a_gateway_that_was_killed_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        routes = PublishedRoutes(1)
        await routes.publish(_next(routes, "a"))
        await routes.watch(_NONE, "killed")
        begin = time.monotonic()
        await routes.taken()
        assert 0.5 < time.monotonic() - begin < PATIENCE_S
        monkeypatch.setattr(published_routes, "_TAKEN_TIMEOUT_S", 3 * PATIENCE_S)
        await routes.publish(_next(routes, "b"))
        await asyncio.wait_for(routes.taken(), PATIENCE_S)

    asyncio.run(scenario())


def test_nobody_is_waited_for_before_there_are_routes() -> None:
    async def scenario() -> None:
        routes = PublishedRoutes(1)
        asked = asyncio.create_task(routes.watch(_NONE, "early"))
        await asyncio.sleep(0)
        await asyncio.wait_for(routes.taken(), PATIENCE_S)
        assert not asked.done()
        await routes.publish(_next(routes, "a"))
        assert (await asked).drained_nodes == ("a",)

    asyncio.run(scenario())
