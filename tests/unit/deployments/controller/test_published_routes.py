"""Whoever has changed something may ask any gateway for it."""

from __future__ import annotations

import asyncio
import time

from loomserve.deployments.controller.published_routes import PublishedRoutes
from loomserve.platform.fleet.messages import Routes

_NONE = -1


def _next(routes: PublishedRoutes, node: str) -> Routes:
    return routes.current.model_copy(update={"drained_nodes": (node,)})


async def _follow(routes: PublishedRoutes, gateway: str, seen: list[int], delay_s: float) -> None:
    version = _NONE
    while True:
        version = (await routes.watch(version, gateway)).version
        await asyncio.sleep(delay_s)
        seen.append(version)


def test_a_change_is_waited_for_until_each_gateway_answers_by_it() -> None:
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
        begin = time.monotonic()
        await routes.taken()
        assert time.monotonic() - begin < 0.5

    asyncio.run(scenario())


def test_a_gateway_that_was_killed_is_waited_for_once() -> None:
    async def scenario() -> None:
        routes = PublishedRoutes(1)
        await routes.publish(_next(routes, "a"))
        await routes.watch(_NONE, "killed")
        begin = time.monotonic()
        await routes.taken()
        first = time.monotonic()
        await routes.publish(_next(routes, "b"))
        await routes.taken()
        assert 0.5 < first - begin < 5
        assert time.monotonic() - first < 0.5

    asyncio.run(scenario())


def test_nobody_is_waited_for_before_there_are_routes() -> None:
    async def scenario() -> None:
        routes = PublishedRoutes(1)
        asked = asyncio.create_task(routes.watch(_NONE, "early"))
        await asyncio.sleep(0)
        await asyncio.wait_for(routes.taken(), 0.5)
        assert not asked.done()
        await routes.publish(_next(routes, "a"))
        assert (await asked).drained_nodes == ("a",)

    asyncio.run(scenario())
