"""Engines' heartbeats to the controller, and what gateways have told them for these."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loomserve.platform.base.periodic import every
from loomserve.platform.base.sqlite import LatestGeneration
from loomserve.platform.fleet.messages import (
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    FIRST_ANSWER_PATH,
    DesiredState,
    FirstAnswer,
    Heartbeat,
)

_PERIOD_S = 2.0
_TIMEOUT_S = 5.0


class Reporting(Protocol):
    """An engine that reports to the controller."""

    def heartbeat(self) -> Heartbeat: ...

    def apply(self, desired: DesiredState) -> None: ...


class HeartbeatSender:
    """Sends the heartbeats of a node's engines every two seconds, all at once, and has each engine
    carry out the desired state that answers its own."""

    def __init__(self, engines: Callable[[], Sequence[Reporting]]) -> None:
        self._engines = engines
        self.controllers = LatestGeneration()
        """Whose orders the engines carry out."""
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)

    async def run(self) -> None:
        # The controller may be restarting; the next heartbeats will reach it.
        await every(_PERIOD_S, lambda: self._send(self._engines()), failed=lambda _: None)

    async def send_now(self, engine: Reporting) -> None:
        """Send one at once; the controller may be away."""
        with contextlib.suppress(Exception):
            await self._send([engine])

    async def _send(self, engines: Sequence[Reporting]) -> None:
        if not engines:
            return
        answer = self._controller.report.remote(*(each.heartbeat() for each in engines))
        for each, desired in zip(engines, await asyncio.wait_for(answer, _TIMEOUT_S), strict=True):
            # One of a controller that another has taken over from changes nothing.
            if self.controllers.admits(desired.generation):
                each.apply(desired)


class ToldAnswer:
    """First answer of the replica's engine, as a gateway reported it; heartbeats pass it on."""

    def __init__(self, changed: Callable[[], Awaitable[None]]) -> None:
        """``changed``: is called when it says something else than before."""
        self.answers = False
        self.problem = ""
        self.routes = [Route(FIRST_ANSWER_PATH, self._told, methods=["PUT"])]
        self._changed = changed

    async def _told(self, request: Request) -> Response:
        told = FirstAnswer.model_validate_json(await request.body())
        before = self.answers, self.problem
        # One that has answered does: another gateway may be at fault.
        self.answers = self.answers or not told.problem
        self.problem = "" if self.answers else told.problem
        if (self.answers, self.problem) != before:
            await self._changed()
        return JSONResponse({})
