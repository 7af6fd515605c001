"""Models' applications on Ray Serve: one for each device that is to have a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray import serve

from loomserve.deployments.engine.deploy import (
    Handed,
    applications,
    hand_to_serve,
    hand_to_serve_elsewhere,
    takes_long,
)
from loomserve.deployments.gateway_apps import start_gateway
from loomserve.deployments.ray_node import LivingNode, drain_node, living_nodes
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.config import Config
from loomserve.platform.fleet.messages import EngineSpec, gateway_app, replica_app


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

    async def deploy(self, spec: EngineSpec, devices: Sequence[str], base: str) -> Handed:
        """Have Serve start replicas; TakenOver: another controller does."""
        await asyncio.to_thread(self._check_owner)
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

    async def delete(self, name: str, devices: Collection[str]) -> None:
        """End a model's replicas on these devices within a minute; raises Serve's errors."""
        await asyncio.to_thread(self._check_owner)
        await asyncio.gather(
            *(
                asyncio.to_thread(serve.delete, replica_app(name, device), _blocking=True)
                for device in devices
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

    async def end_gateway(self, node: str) -> None:
        """Have Serve end a node's gateways, once their requests have ended."""
        await asyncio.to_thread(self._check_owner)
        await asyncio.to_thread(serve.delete, gateway_app(node), _blocking=False)
