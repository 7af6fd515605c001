"""The loads of a model's replicas: told with their engines' outputs, and asked of each replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import aiohttp

from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import LOAD_PATH
from loomserve.platform.state.told_load import ToldLoad
from loomserve.routers.snapshot import RoutingStats

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0

Get = Callable[[str, str, float], Awaitable[str]]
"""The body of the answer to a GET request: address, path, timeout in seconds."""


class LoadReports:
    """Keeps ``last``, the last report of each replica; None: it has sent none.

    A replica that does not answer keeps its last report, which says how old it is. What its engine
    tells of its load meanwhile is newer, and stands in the report from then on.
    """

    def __init__(self, get: Get) -> None:
        self.last: dict[str, RoutingStats | None] = {}
        self._get = get
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._told: dict[str, _Told] = {}

    def set_replicas(self, addresses: Mapping[str, str]) -> None:
        """``addresses``: where each replica listens, by its id."""
        for replica_id, (address, task) in list(self._asking.items()):
            if addresses.get(replica_id) != address:
                task.cancel()
                del self._asking[replica_id], self.last[replica_id]
                self._told.pop(replica_id, None)
        for replica_id, address in addresses.items():
            if replica_id not in self._asking:
                self.last[replica_id] = None
                task = asyncio.create_task(self._follow(replica_id, address))
                self._asking[replica_id] = address, task

    def told(self, replica_id: str, load: ToldLoad, counted_until: float) -> None:
        """Take in a load that a replica's engine has told.

        ``counted_until``: monotonic seconds; the load has what was booked here until then.
        """
        if replica_id in self.last:
            self._told[replica_id] = told = _Told(time.monotonic(), load, counted_until)
            self.last[replica_id] = told.in_report(self.last[replica_id])

    def close(self) -> None:
        self.set_replicas({})

    async def _follow(self, replica_id: str, address: str) -> None:
        async def ask() -> None:
            asked_at = time.monotonic()
            answer = await self._get(address, LOAD_PATH, _TIMEOUT_S)
            report = RoutingStats.model_validate_json(answer)
            told = self._told.get(replica_id)
            newer = told is not None and told.at >= asked_at
            self.last[replica_id] = told.in_report(report) if told and newer else report

        await every(
            _PERIOD_S,
            ask,
            # It may be starting, ending, or busy.
            failed=lambda _: None,
            errors=(aiohttp.ClientError, OSError, TimeoutError, ValueError),
        )


class _Told(NamedTuple):
    """What an engine told, and when it came."""

    at: float
    load: ToldLoad
    counted_until: float

    def in_report(self, report: RoutingStats | None) -> RoutingStats | None:
        """The report with this load, if there is one that tells the rest."""
        if report is None or report.load is None:
            return report
        load = report.load.model_copy(
            update={
                "running": self.load.running,
                "waiting": self.load.waiting,
                "kv_cache_usage": self.load.kv_usage,
                "measured_at": self.counted_until,
            }
        )
        return report.model_copy(update={"load": load})
