"""The routes as gateways know them, who wait for the next ones."""

from __future__ import annotations

import asyncio
import contextlib
import time

from loomserve.platform.fleet.messages import Routes

_WATCH_TIMEOUT_S = 25.0
_UNKNOWN_VERSION = 0


class PublishedRoutes:
    """The last routes that were published; none before the first."""

    def __init__(self, generation: int) -> None:
        """``generation``: the controller's."""
        self.current = Routes(generation=generation, version=_UNKNOWN_VERSION, models=())
        self._changed = asyncio.Condition()

    async def watch(self, version: int) -> Routes:
        """The routes, as soon as they differ from ``version``; at the latest after 25 s."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(
                        lambda: self.current.version not in {_UNKNOWN_VERSION, version}
                    ),
                    _WATCH_TIMEOUT_S,
                )
        return self.current

    async def publish(self, routes: Routes) -> None:
        """Publish routes, whatever version they have, unless they are those that there are."""
        if routes.model_copy(update={"version": self.current.version}) != self.current:
            async with self._changed:
                self.current = routes.model_copy(update={"version": time.monotonic_ns()})
                self._changed.notify_all()
