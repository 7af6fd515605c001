"""A replica's heartbeats to the controller, and what gateways have told it for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

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


class HeartbeatSender:
    """Sends a heartbeat every two seconds, and applies the desired state that answers it."""

    def __init__(
        self, heartbeat: Callable[[], Heartbeat], apply: Callable[[DesiredState], None]
    ) -> None:
        self._heartbeat, self._apply = heartbeat, apply
        self.controllers = LatestGeneration()
        """Whose orders the replica carries out."""
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)

    async def run(self) -> None:
        # The controller may be restarting; the next heartbeat will reach it.
        await every(_PERIOD_S, self._send, failed=lambda _: None)

    async def send_now(self) -> None:
        """Send one at once; the controller may be away."""
        with contextlib.suppress(Exception):
            await self._send()

    async def _send(self) -> None:
        answer = self._controller.report.remote(self._heartbeat())
        desired: DesiredState = await asyncio.wait_for(answer, _TIMEOUT_S)
        # One of a controller that another has taken over from changes nothing.
        if self.controllers.admits(desired.generation):
            self._apply(desired)


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
