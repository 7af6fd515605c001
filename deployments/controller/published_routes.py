"""The routes that gateways wait for, and whether the controller knows enough to publish any."""

from __future__ import annotations

import asyncio
import time

from loomserve.platform.fleet.messages import Routes
from loomserve.platform.fleet.registry import HEARTBEAT_EXPIRES_S

_WATCH_TIMEOUT_S = 25.0
_UNKNOWN_VERSION = 0
_TAKEN_TIMEOUT_S = 1.0
# After a controller's end its replicas find the next one; after a node's end that takes longest.
_LEARNS_S = 20.0


class PublishedRoutes:
    """The last routes that were published, none before the first; and which gateways have them."""

    def __init__(self, generation: int) -> None:
        self.current = Routes(generation=generation, version=_UNKNOWN_VERSION, models=())
        self._changed = asyncio.Condition()
        self._taken: dict[str, int] = {}
        """By gateway, the version that it answers its clients by."""

    async def watch(self, version: int, gateway: str) -> Routes:
        """The routes, once they differ from the gateway's ``version``; at the latest after 25 s."""
        async with self._changed:
            self._taken[gateway] = version
            self._changed.notify_all()
            try:
                async with asyncio.timeout(_WATCH_TIMEOUT_S):
                    await self._changed.wait_for(
                        lambda: self.current.version not in {_UNKNOWN_VERSION, version}
                    )
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                self._taken.pop(gateway, None)
                raise
        return self.current

    async def publish(self, routes: Routes) -> None:
        """Publish routes, whatever version they have, unless they are those that there are."""
        if routes.model_copy(update={"version": self.current.version}) != self.current:
            async with self._changed:
                self.current = routes.model_copy(update={"version": time.monotonic_ns()})
                self._changed.notify_all()

    async def taken(self) -> None:
        """Wait until all gateways that ask answer by the current routes; at most for 1 s."""
        if self.current.version == _UNKNOWN_VERSION:
            return
        async with self._changed:
            try:
                async with asyncio.timeout(_TAKEN_TIMEOUT_S):
                    await self._changed.wait_for(lambda: not self._late())
            except TimeoutError:
                # Nobody waits twice for one that was killed; others ask again by themselves.
                for gateway in self._late():
                    del self._taken[gateway]

    def _late(self) -> list[str]:
        return [name for name, taken in self._taken.items() if taken != self.current.version]


class ReplicaLearning:
    """Whether a controller still learns of replicas, whose heartbeats come to it one by one."""

    def __init__(self, now: float) -> None:
        self._until = self._seen_at = now

    def begin(self, now: float) -> None:
        self._until = now + _LEARNS_S

    def lasts(self, now: float) -> bool:
        """Asked at each look at the fleet: one that stood still meanwhile has heard of nobody."""
        if now - self._seen_at > HEARTBEAT_EXPIRES_S:
            self.begin(now)
        self._seen_at = now
        return now < self._until

    def end(self) -> None:
        self._until = self._seen_at
