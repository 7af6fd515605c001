"""Loads of a model's replicas, and what the KV stores of several nodes report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import aiohttp

from loomserve.deployments.kvstore.stores import Stores
from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import LOAD_PATH
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.load_report import LoadReport
from loomserve.routers.policy import KvLink
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable

_log = logging.getLogger("ray.serve")

_PERIOD_S = 1.0
# Added for one that sleeps: what wakes it is pushed, or tells the controller.
_ASLEEP_S = 4.0
_TIMEOUT_S = 5.0
_STORES_PERIOD_S = 5.0

Get = Callable[[str, str, float], Awaitable[str]]
"""The body of the answer to a GET request: address, path, timeout in seconds."""


class LoadReports:
    """Keeps a table of replicas up to date.

    A replica that does not answer keeps its last report, which becomes the older. What its engine
    pushes of its load meanwhile is newer, and stands in the report from then on.
    """

    def __init__(self, get: Get, table: ReplicaTable) -> None:
        self._get = get
        self._table = table
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._pushed: dict[str, _Pushed] = {}

    def set_replicas(
        self, addresses: Mapping[str, str], nodes: Mapping[str, str] | None = None
    ) -> None:
        """Set which replicas there are: their addresses and, if on several nodes, nodes, by id."""
        for replica_id, (address, task) in list(self._asking.items()):
            if addresses.get(replica_id) != address:
                task.cancel()
                del self._asking[replica_id]
                self._pushed.pop(replica_id, None)
        # One that listens elsewhere has been started anew.
        self._table.set_replicas(self._asking, nodes and {id_: nodes[id_] for id_ in self._asking})
        self._table.set_replicas(addresses, nodes)
        for replica_id, address in addresses.items():
            if replica_id not in self._asking:
                task = asyncio.create_task(self._follow(replica_id, address))
                self._asking[replica_id] = address, task

    def pushed(self, replica_id: str, load: LoadReport, counted_until: float) -> None:
        """Take in a load that a replica's engine has pushed. ``counted_until``: monotonic seconds;
        the load has what was booked here until then."""
        if replica_id in self._asking:
            self._pushed[replica_id] = pushed = _Pushed(time.monotonic(), load, counted_until)
            if (last := self._table.last_load(replica_id)) is not None:
                self._table.report_load(replica_id, pushed.later(last))

    def close(self) -> None:
        self.set_replicas({})

    async def _follow(self, replica_id: str, address: str) -> None:
        async def ask() -> None:
            asked_at = time.monotonic()
            answer = await self._get(address, LOAD_PATH, _TIMEOUT_S)
            # It errs by half of the way there and back at most.
            measured_at = (asked_at + time.monotonic()) / 2
            report = RoutingStats.model_validate_json(answer).received(measured_at)
            pushed = self._pushed.get(replica_id)
            self._table.report(replica_id, report)
            if pushed and pushed.at >= asked_at and report.load is not None:
                self._table.report_load(replica_id, pushed.later(report.load))
            if report.load is not None and report.load.asleep:
                await asyncio.sleep(_ASLEEP_S)

        await every(
            _PERIOD_S,
            ask,
            # It may be starting, ending, or busy.
            failed=lambda _: None,
            errors=(aiohttp.ClientError, OSError, TimeoutError, ValueError),
        )


class _Pushed(NamedTuple):
    """A load that an engine pushed, and when it came."""

    at: float
    load: LoadReport
    counted_until: float

    def later(self, last: ReplicaLoad) -> ReplicaLoad:
        """The last load with what this tells."""
        return last.model_copy(
            update={
                "running": self.load.running,
                "waiting": self.load.waiting,
                "waiting_tokens": self.load.waiting_tokens,
                "kv_cache_usage": self.load.kv_usage,
                "measured_at": self.counted_until,
            }
        )


@dataclass(frozen=True)
class StoreReadings:
    """
    Attributes:
        store_bytes: What the store of a node keeps, in memory and on SSD; of the smallest.
        links: To a node, from a node.
    """

    store_bytes: int
    links: Mapping[tuple[str, str], KvLink]


async def follow_stores(stores: Stores, tell: Callable[[StoreReadings], None]) -> NoReturn:
    """Read the stores' usage periodically, until the task is cancelled."""

    async def read() -> None:
        states = await stores.usages()
        links = {
            (node, peer.node): KvLink(peer.setup_s, peer.bytes_per_s)
            for node, state in states.items()
            if state.network is not None
            for peer in state.network.peers
        }
        sizes = (state.capacity_bytes + state.ssd_capacity_bytes for state in states.values())
        tell(StoreReadings(min(sizes), links))

    # While no store answers, the last ones hold.
    await every(
        _STORES_PERIOD_S, read, failed=lambda error: _log.debug("stores of nodes: %r", error)
    )
