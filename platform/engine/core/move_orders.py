"""The replica's part in having requests go on elsewhere: each order is carried out once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from loomserve.platform.fleet.messages import MovedRequests, MoveOrder

_log = logging.getLogger(__name__)

# Front ends move a request within a step; one that has not in this time stays.
_TIMEOUT_S = 10.0


class RequestMover(Protocol):
    """An engine's process, as :class:`.host.EngineHost` has it."""

    async def move_requests(self, to: str, most: int, *, timeout_s: float) -> int: ...


class MoveOrders:
    """Carries out orders, one at a time."""

    def __init__(self, engine: RequestMover, told: Callable[[], Awaitable[None]]) -> None:
        """``told`` is called when there is something new to tell in ``last``."""
        self.last: MovedRequests | None = None
        """The last order, and what came of it."""
        self._engine, self._told = engine, told
        self._task: asyncio.Task[None] | None = None

    def apply(self, order: MoveOrder | None) -> None:
        """Carry an order out, unless that has been done, or one is under way."""
        known = self.last is not None and order is not None and self.last.order == order.id
        if order is not None and not known and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._carry_out(order))

    async def close(self) -> None:
        """Leave an order that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _carry_out(self, order: MoveOrder) -> None:
        left, problem = 0, ""
        try:
            left = await self._engine.move_requests(order.to, order.requests, timeout_s=_TIMEOUT_S)
        except Exception as error:
            _log.warning("no requests could be moved to %s: %r", order.to, error)
            problem = f"the engine could not be asked for its requests: {error!r}"
        self.last = MovedRequests(order=order.id, requests=left, problem=problem)
        with contextlib.suppress(Exception):  # the next heartbeat tells it, too
            await self._told()
