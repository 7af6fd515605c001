"""A replica's heartbeats to the controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ray import serve

from loomserve.platform.base.generation import LatestGeneration
from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import (
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    DesiredState,
    Heartbeat,
)

_PERIOD_S = 2.0
_TIMEOUT_S = 5.0


class HeartbeatSender:
    """Sends a heartbeat every two seconds, and applies the desired state that answers it."""

    def __init__(
        self, heartbeat: Callable[[], Heartbeat], apply: Callable[[DesiredState], None]
    ) -> None:
        """
        Args:
            heartbeat: makes one.
            apply: is given each answer.
        """
        self._heartbeat, self._apply = heartbeat, apply
        self.controllers = LatestGeneration()
        """Whose orders the replica carries out."""
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)

    async def run(self) -> None:
        """Send until cancelled."""
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
