"""Aliases of controllers: told at once, and kept for the next one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from loomserve.deployments.controller.controller import Controller
from loomserve.platform.base.errors import BadRequest, Conflict
from loomserve.platform.config import Alias
from loomserve.platform.fleet.messages import Routes
from tests.unit.deployments.controller.controllers import (
    CONFIG,
    PATIENCE_S,
    FakeServe,
    controlled,
    told,
)
from tests.unit.deployments.controller.test_controller import EXTRA
from tests.unit.platform.fleet.heartbeats import COLD, HOT


async def _with_other_aliases(controller: Controller, known: Routes) -> Routes:
    """The next routes whose aliases differ; replicas that start change routes, too."""
    routes = known
    async with asyncio.timeout(PATIENCE_S):
        while routes.aliases == known.aliases:
            routes = await controller.watch(routes.version, "gateway")
    return routes


def test_aliases_are_told_to_gateways_at_once_and_outlive_controllers(serve: FakeServe) -> None:
    split = Alias(models={HOT.name: 95, COLD.name: 5})
    config = CONFIG.model_copy(update={"aliases": {"chat": split, "old": split}})

    async def scenario() -> None:
        async with controlled(first=True, config=config) as one:
            routes = await one.watch(-1, "gateway")
            assert routes.aliases == {"chat": split, "old": split}
            half = Alias(models={HOT.name: 1, COLD.name: 1}, sticky="key")
            waiting = asyncio.create_task(_with_other_aliases(one, routes))
            await asyncio.sleep(0.05)
            state = await told(one.set_alias("chat", half))
            assert (await waiting).aliases == {"chat": half, "old": split}
            assert [alias.sticky for alias in state.aliases] == ["key", None]
            await told(one.set_alias("old", None))
            await told(one.set_alias("org/new", split))
            with pytest.raises(BadRequest, match="no model 'none'"):
                await told(one.set_alias("chat", Alias(models={"none": 1})))
            with pytest.raises(Conflict, match="is an alias"):
                await told(one.load(EXTRA.model_copy(update={"name": "chat"})))
            await told(one.load(EXTRA))
        async with controlled(config=config) as other:
            assert [alias.name for alias in other._state().aliases] == ["chat", "org/new"]
            assert other._fleet.aliases.all["chat"] == half
            await told(other.set_alias("chat", None))
            await told(other.set_alias("org/new", None))
        async with controlled(config=config) as third:
            assert other._fleet.aliases.all == third._fleet.aliases.all == {}

    asyncio.run(scenario())


def test_a_gateway_that_waits_for_models_is_told_of_no_alias_before(serve: FakeServe) -> None:
    config = CONFIG.model_copy(update={"aliases": {"chat": Alias(models={HOT.name: 1})}})

    async def scenario() -> None:
        async with controlled(config=config) as one:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    pytest.fail(f"it was told {await one.watch(-1, 'gateway')}")

    asyncio.run(scenario())
