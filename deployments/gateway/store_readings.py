"""What the KV stores of several nodes keep, and what fetches between them take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from loomserve.deployments.kvstore.stores import Stores, read_usages
from loomserve.platform.base.periodic import every
from loomserve.routers.policy import KvLink

_log = logging.getLogger("ray.serve")

_PERIOD_S = 5.0


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
    """Read what stores say again and again, until the task is cancelled."""

    async def read() -> None:
        states = await read_usages(stores)
        links = {
            (node, peer.node): KvLink(peer.setup_s, peer.bytes_per_s)
            for node, state in states.items()
            if state.network is not None
            for peer in state.network.peers
        }
        sizes = (state.capacity_bytes + state.ssd_capacity_bytes for state in states.values())
        tell(StoreReadings(min(sizes), links))

    # While no store answers, the last ones hold.
    await every(_PERIOD_S, read, failed=lambda error: _log.debug("stores of nodes: %r", error))
