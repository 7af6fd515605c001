"""What fetches of KV between nodes take, as their stores have measured it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NoReturn

from loomserve.deployments.kvstore.stores import Stores, read_usages
from loomserve.platform.base.periodic import every
from loomserve.routers.policies.kv_travel import KvLink

_log = logging.getLogger("ray.serve")

_PERIOD_S = 5.0

Links = Mapping[tuple[str, str], KvLink]
"""To a node, from a node."""


async def follow_links(stores: Stores, tell: Callable[[Links], None]) -> NoReturn:
    """Read the links' rates again and again, until the task is cancelled."""

    async def read() -> None:
        states = await read_usages(stores)
        tell(
            {
                (node, peer.node): KvLink(peer.setup_s, peer.bytes_per_s)
                for node, state in states.items()
                if state.network is not None
                for peer in state.network.peers
            }
        )

    # While no store answers, the last rates hold.
    await every(_PERIOD_S, read, failed=lambda error: _log.debug("links of stores: %r", error))
