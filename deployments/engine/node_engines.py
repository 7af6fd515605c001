"""The engines of a node: one actor has them all, those that sleep and those that serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve

from loomserve.deployments.engine.heartbeat import HeartbeatSender
from loomserve.deployments.engine.hosted_engine import HostedEngine
from loomserve.deployments.ray_node import keep_calls_on_node
from loomserve.deployments.serve_options import serve_options
from loomserve.platform.config import Server
from loomserve.platform.engine.process.environment import KEEPS_GPUS_VISIBLE
from loomserve.platform.fleet.messages import ENGINES_DEPLOYMENT, EngineOrder
from loomserve.platform.nodes.resources import on_node


class NodeEngines:
    """Serve's deployment class of a node. An engine ends when it is told to, or with this process;
    when its replica is killed it goes on, and Serve starts another one, which holds it."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_calls_on_node()
        self._engines: dict[tuple[str, str], HostedEngine] = {}
        self._heartbeats = HeartbeatSender(
            lambda: [each for each in self._engines.values() if each.serves]
        )
        self._heart = asyncio.create_task(self._heartbeats.run())

    async def check_health(self) -> None:
        if self._heart.done():
            raise RuntimeError("the engines' heartbeats have ended")

    async def start(self, order: Mapping[str, Any]) -> None:
        """Begin to start an engine, unless it is there."""
        await self._engine(EngineOrder.model_validate(order))

    async def hold(self, order: Mapping[str, Any], pid: int) -> tuple[int, str]:
        """Have a replica hold an engine: its process once it is ready, or why it cannot start."""
        engine = await self._engine(EngineOrder.model_validate(order))
        engine.replica = pid
        if problem := await asyncio.shield(engine.started):
            return 0, problem
        await self._heartbeats.send_now(engine)
        return engine.pid, ""

    async def let_go(self, model: str, device: str) -> None:
        """Have an engine stay when its replica goes the next time."""
        if (engine := self._engines.get((model, device))) is not None:
            engine.stays = True

    async def release(self, model: str, device: str, pid: int) -> None:
        """End the engine that a replica holds no more, unless it is to stay."""
        engine = self._engines.get((model, device))
        if engine is not None and engine.replica == pid:
            engine.replica, ends, engine.stays = None, not engine.stays, False
            if ends:
                await engine.end()

    async def end(self, model: str, device: str) -> None:
        """End an engine, whoever holds it, once its requests have ended or gone on elsewhere."""
        if (engine := self._engines.get((model, device))) is not None:
            await engine.end()

    async def __del__(self) -> None:
        """Serve's last call."""
        if hasattr(self, "_engines"):
            await asyncio.gather(*(each.end() for each in [*self._engines.values()]))

    async def _engine(self, order: EngineOrder) -> HostedEngine:
        """The engine that is ordered, which begins to start if it is not there."""
        key = order.spec.model.name, order.device
        while (there := self._engines.get(key)) is not None:
            if there.order.spec.model == order.spec.model and not there.ends:
                return there
            await there.end()
            self._forget(key, there)
        self._engines[key] = made = HostedEngine(order, self._heartbeats)
        made.living.add_done_callback(lambda _: self._forget(key, made))
        return made

    def _forget(self, key: tuple[str, str], engine: HostedEngine) -> None:
        if self._engines.get(key) is engine:
            del self._engines[key]


def build_engines_app(node: str, server: Server) -> Any:
    """The application of a node's engines."""
    return serve.deployment(
        NodeEngines,
        name=ENGINES_DEPLOYMENT,
        num_replicas=1,
        # Requests do not pass through Serve.
        max_ongoing_requests=1_000_000,
        graceful_shutdown_timeout_s=server.drain_timeout_s + 15,
        ray_actor_options={
            "num_cpus": 0,
            "resources": on_node(node),
            # Ray has to know it before it starts the process; it starts others sooner.
            "runtime_env": {"env_vars": KEEPS_GPUS_VISIBLE},
        },
        **serve_options(server.log_format),
    ).bind()
