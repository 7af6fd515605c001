"""The gateway: the platform's HTTP server and multi-model ingress.

It listens on the server's address itself, and has vLLM's front ends of all models. A request
crosses two processes, this one and the engine's; docs/performance.md says why no proxy stands
before it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from loomserve.deployments.gateway.composition import CALL_TIMEOUT_S, compose
from loomserve.deployments.gateway.load_reports import follow_stores
from loomserve.deployments.kvstore.stores import Stores
from loomserve.deployments.ray_node import keep_calls_on_node
from loomserve.deployments.serve_options import ended_with_caller, log_requests
from loomserve.platform.access.policy.bank import LimitAnswer, LimitReport
from loomserve.platform.access.shared_counts import POLL_INTERVAL_S, SharedCounts
from loomserve.platform.access.token_meter import SAVE_S
from loomserve.platform.base.periodic import every
from loomserve.platform.base.sqlite import LatestGeneration
from loomserve.platform.config import Batch, Elastic, Server
from loomserve.platform.fleet.messages import KvAccess, LineRequest, Routes
from loomserve.platform.fleet.nodes import GatewayHeartbeat, GatewayOrders

_log = logging.getLogger("ray.serve")

_NO_VERSION = -1


class Gateway:
    """Serve deployment that listens for HTTP and has engines, store and batch lane answer."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        server: dict[str, Any],
        internal_token: str,
        kv: dict[str, Any] | None,
        isolates_tenants: bool,
        batch: dict[str, Any] | None,
        several_nodes: bool = False,
        elastic: dict[str, Any] | None = None,
    ) -> None:
        keep_calls_on_node()
        checked = Server.model_validate(server)
        log_requests(checked.log_format)
        stores = KvAccess.model_validate(kv) if kv else None
        self._parts = parts = await compose(
            checked,
            internal_token,
            stores,
            Batch.model_validate(batch) if batch else None,
            Elastic.model_validate(elastic or {}),
            isolates_tenants=isolates_tenants,
            several_nodes=several_nodes,
        )
        self._tasks: list[asyncio.Task[NoReturn]] = []
        # A gateway that restarts must not answer before it knows the models.
        self._controllers, self._id = LatestGeneration(), uuid.uuid4().hex
        self._version = self._apply(await parts.controller.watch.remote(_NO_VERSION, self._id))
        await parts.others.listen(parts.page.own_parts, parts.http.drain)
        work = [
            every(0.0, self._follow_controller, failed=_keep_routes, retry_s=0.5),
            parts.keys.follow(),
            _saving(SAVE_S, parts.tokens.save),
            _saving(checked.usage.interval_s, parts.usage.save),
            every(POLL_INTERVAL_S, self._read_counts),
        ]
        if parts.allowances is not None:
            work.append(parts.allowances.keep(self._report))
        if stores is not None:
            work.append(follow_stores(Stores(stores), parts.dispatcher.set_stores))
        self._tasks = [asyncio.create_task(each) for each in work]
        await parts.http.start()

    async def check_health(self) -> None:
        http = self._parts.http
        if not http.drains and (not http.alive or any(task.done() for task in self._tasks)):
            raise RuntimeError("the gateway's HTTP server or its view of models or keys has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_tasks"):
            for task in self._tasks:
                task.cancel()
            await self._parts.closing.aclose()

    async def complete_line(self, line: dict[str, Any]) -> tuple[int, bytes]:
        """Have a batch's line computed, for the batch lane; the answer's status and body."""
        return await self._parts.lines.complete(LineRequest.model_validate(line))

    async def _read_counts(self) -> None:
        parts = self._parts
        counts = parts.others.counts
        counts.look()
        if isinstance(counts, SharedCounts):
            parts.requests.look(parts.keys.all)
            parts.tokens.look(parts.keys.all)

    async def _report(self, limits: LimitReport) -> LimitAnswer:
        """Tell the controller of this gateway; returns what it may use."""
        others, sequences = self._parts.others, self._parts.sequences
        heartbeat = GatewayHeartbeat(others.address, sequences.total, limits)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            orders: GatewayOrders = await self._parts.controller.report_gateway.remote(heartbeat)
        self._controllers.check(orders.generation)
        others.elsewhere = orders.others
        return orders.limits

    async def _follow_controller(self) -> None:
        """Take in the next routes; the controller answers once there are any."""
        asked = self._parts.controller.watch.remote(self._version, self._id)
        self._version = self._apply(await ended_with_caller(asked))

    def _apply(self, routes: Routes) -> int:
        parts = self._parts
        self._controllers.check(routes.generation)
        parts.routes.apply(routes.models, routes.aliases)
        parts.routes.drained = parts.node in routes.drained_nodes
        parts.dispatcher.set_models(routes.models)
        parts.metrics.set_models(
            {route.name: [replica.id for replica in route.replicas] for route in routes.models}
        )
        parts.metrics.adapters.set_adapters(routes.adapters)
        parts.lengths.set_models(
            {each.name: each.model.predictor for each in routes.models if each.model.predictor}
        )
        return routes.version


def _keep_routes(error: Exception) -> None:
    # Serve restarts the controller; until then the last routes hold.
    _log.warning("the controller does not answer: %r", error)


def _saving(period_s: float, save: Callable[[], None]) -> Coroutine[Any, Any, NoReturn]:
    return every(period_s, lambda: asyncio.to_thread(save))
