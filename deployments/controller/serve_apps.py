"""Models' applications on Ray Serve: one for each device that is to have a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from loomserve.deployments.engine.app import (
    Handed,
    applications,
    hand_to_serve,
    hand_to_serve_elsewhere,
    takes_long,
)
from loomserve.deployments.engine.engine_replica import engines_of
from loomserve.deployments.engine.node_engines import build_engines_app
from loomserve.deployments.gateway_apps import start_gateway
from loomserve.deployments.ray_node import LivingNode, drain_node, living_nodes
from loomserve.deployments.serve_options import start_apps
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.config import Config
from loomserve.platform.fleet.messages import EngineSpec, engines_app, gateway_app, replica_app


class ServeApps:
    """The applications, each named after its model and its device."""

    def __init__(
        self,
        config: Config,
        internal_token: str,
        store: StoreOptions | None,
        check_owner: Callable[[], None],
    ) -> None:
        """``check_owner`` raises if another controller has taken over, which Serve cannot tell."""
        self._check_owner = check_owner
        self._gateways = config, internal_token, store
        self._deploying: dict[str, Any] = {}
        self._nodes = {device.name: device.on for device in config.devices}
        self._starting = asyncio.Lock()

    async def deploy(self, spec: EngineSpec, devices: Sequence[str], base: str) -> Handed:
        """Have Serve start replicas; TakenOver: another controller does."""
        await asyncio.to_thread(self._check_owner)
        await self._start_hosts({self._nodes[device] for device in devices})
        if not takes_long(spec):
            return await asyncio.to_thread(hand_to_serve, spec, devices, base)
        name = spec.model.name
        self._deploying[name] = work = hand_to_serve_elsewhere.remote(spec, devices, base)
        try:
            handed: Handed = await work
        except ray.exceptions.RayError as error:
            return Handed(problem=str(error).splitlines()[-1])
        finally:
            del self._deploying[name]
        return handed

    def stop_deploying(self, name: str) -> None:
        """Stop handing the model to Serve, if that is under way."""
        if name in self._deploying:
            ray.cancel(self._deploying[name], force=True)

    async def _start_hosts(self, nodes: Collection[str]) -> None:
        """Have Serve start the actors of these nodes' engines, where they are missing."""
        async with self._starting:
            there = await self.statuses()
            server = self._gateways[0].server
            missing = {
                app: build_engines_app(node, server)
                for node in nodes
                if (app := engines_app(node)) not in there
            }
            if missing:
                await asyncio.to_thread(start_apps, missing)

    async def delete(self, name: str, devices: Collection[str]) -> None:
        """End a model's replicas on these devices within a minute, and their engines, whether they
        sleep or not; raises Serve's errors."""
        await self._delete(name, devices)
        await self._tell_hosts("end", name, devices)

    async def release(self, name: str, devices: Collection[str]) -> None:
        """The same, but have the engines stay without a replica."""
        await self._tell_hosts("let_go", name, devices)
        await self._delete(name, devices)

    async def _delete(self, name: str, devices: Collection[str]) -> None:
        await asyncio.to_thread(self._check_owner)
        await asyncio.gather(
            *(
                asyncio.to_thread(serve.delete, replica_app(name, device), _blocking=True)
                for device in devices
            )
        )

    async def _tell_hosts(self, what: str, name: str, devices: Collection[str]) -> None:
        """Call the actors that have these engines; where one does not run, its engines have
        ended."""
        await asyncio.to_thread(self._check_owner)
        apps = await self.statuses()
        nodes = {device: self._nodes[device] for device in devices}
        running = {node for node in nodes.values() if _runs(apps.get(engines_app(node)))}
        await asyncio.gather(
            *(
                getattr(engines_of(node), what).remote(name, device)
                for device, node in nodes.items()
                if node in running
            )
        )

    async def statuses(self) -> Mapping[str, Any]:
        return await asyncio.to_thread(applications)

    async def nodes(self) -> dict[str, LivingNode]:
        return await asyncio.to_thread(living_nodes)

    async def drain_node(self, ray_id: str, deadline_s: float) -> None:
        """Have Ray leave a node, as :func:`drain_node` does."""
        await asyncio.to_thread(self._check_owner)
        await asyncio.to_thread(drain_node, ray_id, deadline_s)

    async def start_gateway(self, node: str) -> None:
        await asyncio.to_thread(self._check_owner)
        await start_gateway.remote(*self._gateways, node)

    async def end_on(self, node: str) -> None:
        """Have Serve end what a node has of its own, gateways once their requests have ended."""
        await asyncio.to_thread(self._check_owner)
        for app in {gateway_app(node), engines_app(node)} & (await self.statuses()).keys():
            await asyncio.to_thread(serve.delete, app, _blocking=False)


def _runs(app: Any) -> bool:
    return app is not None and bool(app.status == ApplicationStatus.RUNNING)
