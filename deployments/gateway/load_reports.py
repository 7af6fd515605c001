"""The loads of a model's replicas, asked of each on its own socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import LOAD_PATH
from loomserve.routers.snapshot import RoutingStats

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0

Get = Callable[[str, str, float], Awaitable[str]]
"""The body of the answer to a GET request: address, path, timeout in seconds."""


class LoadReports:
    """Keeps ``last``, the last report of each replica; None: it has sent none.

    A replica that does not answer keeps its last report, which says how old it is.
    """

    def __init__(self, get: Get) -> None:
        self.last: dict[str, RoutingStats | None] = {}
        self._get = get
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}

    def set_replicas(self, addresses: Mapping[str, str]) -> None:
        """``addresses``: where each replica listens, by its id."""
        for replica_id, (address, task) in list(self._asking.items()):
            if addresses.get(replica_id) != address:
                task.cancel()
                del self._asking[replica_id], self.last[replica_id]
        for replica_id, address in addresses.items():
            if replica_id not in self._asking:
                self.last[replica_id] = None
                task = asyncio.create_task(self._follow(replica_id, address))
                self._asking[replica_id] = address, task

    def close(self) -> None:
        self.set_replicas({})

    async def _follow(self, replica_id: str, address: str) -> None:
        async def ask() -> None:
            report = await self._get(address, LOAD_PATH, _TIMEOUT_S)
            self.last[replica_id] = RoutingStats.model_validate_json(report)

        await every(
            _PERIOD_S,
            ask,
            # It may be starting, ending, or busy.
            failed=lambda _: None,
            errors=(aiohttp.ClientError, OSError, TimeoutError, ValueError),
        )
