"""Follows the nodes of a cluster: gateways on each, and what operators drain."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection

from loomserve.deployments.controller.models import ModelLifecycle
from loomserve.deployments.controller.serve_apps import ServeApps
from loomserve.deployments.kvstore.node_stores import NodeStores
from loomserve.deployments.ray_node import LivingNode
from loomserve.platform.access.policy.bank import LimitBank
from loomserve.platform.base.periodic import every
from loomserve.platform.config import Config
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import nodes_with_gateways

_log = logging.getLogger("ray.serve")

_PERIOD_S = 2.0
# Gateways are told to say that they are not ready, and their load balancers have to ask.
_LEAST_DRAIN_S = 10.0
# What Ray still has there gets so long to leave.
_RAY_DEADLINE_S = 60.0


class NodeKeeper:
    """Has Serve and Ray do what nodes' states ask for; of a cluster only."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        models: ModelLifecycle,
        apps: ServeApps,
        limits: LimitBank,
        stores: NodeStores | None,
        publish: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``publish`` tells gateways."""
        self._config, self._fleet = config, fleet
        self._models, self._apps = models, apps
        self._limits, self._publish, self._clock = limits, publish, clock
        self._stores = stores
        self._taken_over: set[str] = set()

    async def run(self) -> None:
        # Ray's own head may be away; what was known of nodes then holds.
        await every(_PERIOD_S, self.follow, failed=lambda error: _log.warning("nodes: %r", error))

    async def follow(self) -> None:
        """See which nodes are up, and act on it."""
        nodes = self._fleet.nodes
        up = await self._apps.nodes()
        leaving = frozenset(name for name, node in up.items() if node.is_leaving)
        nodes.follow(frozenset(up), leaving)
        self._limits.keep_nodes(nodes.up)
        nodes.state_node = next((name for name, node in up.items() if node.has_state), "")
        self._models.set_nodes(nodes.up, nodes.emptied)
        await self._publish()
        if self._config.has_gateways_on_each_node:
            await self._start_gateways()
        now = self._clock()
        await self._take_over(nodes.emptied & up.keys())
        for name in [*nodes.drained]:
            if name in up and name not in nodes.left and self._may_leave(name, now):
                await self._leave(name, up[name])

    async def _leave(self, name: str, node: LivingNode) -> None:
        nodes = self._fleet.nodes
        # Whoever takes the drain back meanwhile waits for the node to come back.
        nodes.leave(name)
        try:
            await self._apps.end_on(name)
            await self._apps.drain_node(node.ray_id, _RAY_DEADLINE_S)
        except BaseException:
            nodes.left.discard(name)
            raise

    async def _take_over(self, leaving: Collection[str]) -> None:
        """Have other nodes' KV stores copy the blocks of leaving nodes, once."""
        self._taken_over &= set(leaving)
        for name in sorted(set(leaving) - self._taken_over):
            self._taken_over.add(name)
            if self._stores is not None:
                blocks = await self._stores.take_over(name)
                _log.info("other nodes have %d KV blocks of node %s", blocks, name)

    def _may_leave(self, name: str, now: float) -> bool:
        # It may have been taken back since.
        since = self._fleet.nodes.drained.get(name)
        if since is None or now - since < _LEAST_DRAIN_S:
            return False
        late = now - since > self._config.server.drain_timeout_s
        return late or self._fleet.nodes.is_empty(name, now)

    async def _start_gateways(self) -> None:
        """Start missing gateways. Those of a node that is down come back with it."""
        nodes = self._fleet.nodes
        there = nodes_with_gateways(await self._apps.statuses())
        for name in sorted(nodes.usable - there - {nodes.state_node}):
            await self._apps.start_gateway(name)
