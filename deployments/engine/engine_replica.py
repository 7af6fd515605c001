"""A replica of a model: it holds an engine of its node, and ends with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from loomserve.deployments.ray_node import keep_calls_on_node
from loomserve.platform.base.errors import StartError
from loomserve.platform.fleet.messages import ENGINES_DEPLOYMENT, engines_app

_AGAIN_S = 0.5


@cache
def engines_of(node: str) -> DeploymentHandle[Any]:
    """The actor of a node's engines; each handle has a router, which stays."""
    return serve.get_deployment_handle(ENGINES_DEPLOYMENT, engines_app(node))


class EngineReplica:
    """Serve's deployment class of a model, which Serve scales, places and starts again. All that
    is done with the engine its node's :class:`NodeEngines` do."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, device: str, node: str, order: Mapping[str, Any]
    ) -> None:
        """``order``: an EngineOrder. Raises StartError if the engine cannot start."""
        keep_calls_on_node()
        self._model, self._device = model, device
        self._engines = engines_of(node)
        pid, problem = await self._held(order)
        if problem:
            raise StartError(problem)
        self._leaving, self._ended = False, asyncio.Event()
        # The kernel tells its end at once, and nobody looks meanwhile.
        self._engine = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._engine, self._end)

    async def _held(self, order: Mapping[str, Any]) -> tuple[int, str]:
        while True:
            try:
                held: tuple[int, str] = await self._engines.hold.remote(order, os.getpid())
            except RayActorError:  # the node's engines have ended with their actor, which restarts
                await asyncio.sleep(_AGAIN_S)
            else:
                return held

    def _end(self) -> None:
        """End this process, which no call of Serve's asked for: Serve replaces a replica that is
        gone within 2 s, and one that is unhealthy after 6 s."""
        if not self._leaving:
            os._exit(1)
        asyncio.get_running_loop().remove_reader(self._engine)
        self._ended.set()

    async def __del__(self) -> None:
        """Serve's last call: the engine ends, unless it is to stay without a replica."""
        if hasattr(self, "_ended"):
            self._leaving = True
            works = map(asyncio.ensure_future, (self._release(), self._ended.wait()))
            await asyncio.wait(list(works), return_when=asyncio.FIRST_COMPLETED)

    async def _release(self) -> object:
        return await self._engines.release.remote(self._model, self._device, os.getpid())
