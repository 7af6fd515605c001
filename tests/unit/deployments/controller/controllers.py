"""Controllers over a Serve that is made up, and what tests ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.engine.app import Handed
from loomserve.deployments.ray_node import LivingNode
from loomserve.platform.base.reply import Reply
from loomserve.platform.config import LOCAL_NODE, Config
from loomserve.platform.fleet.messages import (
    EngineSpec,
    FrontEndSpec,
    Heartbeat,
    devices_with_replicas,
    replica_app,
)
from loomserve.platform.state import ModelStatus
from tests.unit.platform.fleet.heartbeats import COLD, HOT

CONFIG = Config(
    devices=[{"name": "core0", "cores": (0,)}, {"name": "core1", "cores": (1,)}],
    models=[HOT.model_copy(update={"source": "demo"}), COLD],
)
PATIENCE_S = 10.0


class FakeServe:
    """Applications that outlive controllers, as Serve's do; calls fail as often as told."""

    def __init__(self) -> None:
        self.apps: set[str] = set()
        self.deleting: set[str] = set()
        self.up: set[str] = {LOCAL_NODE}
        self.failing: list[Exception] = []
        self.hangs = False
        self.cancelled: list[str] = []
        self.deletes = 0

    def devices(self, model: str) -> list[str]:
        return sorted(devices_with_replicas(model, dict.fromkeys(self.apps)))

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.failing:
            raise self.failing.pop(0)

    async def deploy(self, spec: EngineSpec, devices: Sequence[str], base: str) -> Handed:
        await self._answer()
        new = {replica_app(spec.model.name, device) for device in devices}
        assert not new & self.deleting, "Serve would delete them all the same"
        self.apps |= new
        return Handed(FrontEndSpec(path=spec.path, engine_options={}))

    def stop_deploying(self, name: str) -> None:
        self.cancelled.append(name)

    async def delete(self, name: str, devices: Collection[str]) -> None:
        self.deletes += 1
        await self._answer()
        gone = {replica_app(name, device) for device in devices}
        self.apps -= gone
        self.deleting -= gone

    async def release(self, name: str, devices: Collection[str]) -> None:
        await self._answer()
        self.apps -= {replica_app(name, device) for device in devices}

    async def statuses(self) -> Mapping[str, Any]:
        return {
            app: SimpleNamespace(status="DELETING" if app in self.deleting else "RUNNING")
            for app in self.apps
        }

    async def nodes(self) -> dict[str, LivingNode]:
        return {name: LivingNode(name, has_state=False) for name in self.up}


@asynccontextmanager
async def controlled(*, first: bool = False, config: Config = CONFIG) -> AsyncIterator[Controller]:
    """One controller, which dies at the end of the block without a word."""
    made = Controller.__new__(Controller)
    store = {"folder": "/nowhere", "arena": "/nowhere/arena", "memory": 1}
    replicas = {model.name: 1 for model in config.models}
    await Controller.__init__(made, config.model_dump(mode="json"), replicas, "t", "/", store)
    try:
        if first:
            await made.load_configured()
            apps: Any = made._models._apps
            await until(lambda: all(apps.devices(model.name) for model in config.models))
        yield made
    finally:
        await end(made)


async def end(controller: Controller) -> None:
    """Have it die without a word."""
    for task in [*controller._tasks, *controller._models._tasks]:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
    await controller._rebalancing.rebalancer.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def told(answer: Awaitable[Reply[Any]]) -> Any:
    return (await answer).get()


async def heard(controller: Controller, *reports: Heartbeat) -> None:
    for each in reports:
        await controller.report(each)


def states(controller: Controller) -> dict[str, ModelStatus]:
    return {model.name: model.status for model in controller._state().models}
