"""A replica of a model: one vLLM engine and its own HTTP server, under Ray Serve's care.

The engine's own ASGI app answers requests on the replica's own socket, and the gateway forwards
bytes to it. Ray Serve still starts, places, watches, scales and restarts the replica and still
chooses it for each request; only the tokens do not travel as Ray objects, which costs up to half of
the throughput of a small model (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from starlette.routing import Route

from loomserve.deployments.engine.claiming import claim_device, stages_of
from loomserve.deployments.engine.heartbeat import HeartbeatSender
from loomserve.deployments.engine.ray_engine import MeteredEngine
from loomserve.deployments.ray_node import keep_calls_on_node, node_address
from loomserve.platform.disaggregation.replica.agent import RoleAgent
from loomserve.platform.disaggregation.replica.endpoint import PrefillEndpoint
from loomserve.platform.engine.footprint import Footprint
from loomserve.platform.fleet.messages import (
    PREFILL_PATH,
    DesiredState,
    EngineSpec,
    Heartbeat,
)
from loomserve.platform.http.dead_engine import DeadEngineApp
from loomserve.platform.http.guarded_app import GuardedApp
from loomserve.platform.http.missing_endpoints import MissingEndpoints
from loomserve.platform.http.protocol import INTERNAL, bounded_protocol
from loomserve.platform.http.server import HttpServer
from loomserve.platform.lending.replica.agent import LoanAgent
from loomserve.platform.requests.engine_request import FORWARDED, engine_path
from loomserve.platform.run.sockets import listen_locally
from loomserve.routers.snapshot import RoutingStats


class EngineServer(LLMServer):  # type: ignore[misc]
    """Serve's deployment class of a model."""

    engine: MeteredEngine

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, llm_config: LLMConfig, spec: dict[str, Any]
    ) -> None:
        keep_calls_on_node()
        began = time.monotonic()
        self._spec = EngineSpec.model_validate(spec)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._draining = False
        self._stop_timeout_s = self._spec.drain_timeout_s
        self._claim = await claim_device(self._spec)
        await super().__init__(llm_config, engine_cls=MeteredEngine)
        self._role = RoleAgent(self.engine.llm, self._spec, self._claim.device.name)
        self._loans = LoanAgent(self.engine.call_loans, self._spec, self._replica_id)
        await self._listen()
        self._footprint = self._measured(began)
        heartbeats = HeartbeatSender(self._heartbeat, self._apply)
        self._tasks = [
            asyncio.create_task(work)
            for work in (self._footprint.keep(), heartbeats.run(), self._loans.run())
        ]

    async def _listen(self) -> None:
        app = await self.engine.build_asgi_app()
        app.router.routes.append(Route(PREFILL_PATH, PrefillEndpoint(self.engine.llm)))
        app.router.routes += self._loans.routes
        answering = MissingEndpoints(app, {engine_path(path): path for path in FORWARDED})
        living = DeadEngineApp(answering, lambda: self.engine.llm.errored)
        self._app = GuardedApp(living, self._spec.internal_token)
        sock, self._address = listen_locally(f"engine-{self._replica_id}", node_address())
        self._http = HttpServer(self._app, sock, protocol=bounded_protocol(INTERNAL))
        await self._http.start()

    def _measured(self, began: float) -> Footprint:
        borrowed_bytes = self._spec.lending.borrow_bytes if self._spec.lending else 0
        return Footprint(
            self.engine.facts(self._spec.path, borrowed_bytes, self._spec.model.kv_cache_memory),
            start_s=time.monotonic() - began,
            on_cpu=self._claim.device.kind == "cpu",
        )

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Serve's hook: constant facts, which routers get with the replica itself."""
        return {"address": self._address, "device": self._claim.device.name}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook: what routers decide by, polled about once a second."""
        return self._stats().model_dump(mode="json")

    async def check_health(self) -> None:
        await super().check_health()
        if not self._http.alive:
            raise RuntimeError("the replica's HTTP server has ended")

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            model=self._spec.model,
            replica_id=self._replica_id,
            device=self._claim.device.name,
            stages=stages_of(self._spec),
            address=self._address,
            pid=os.getpid(),
            max_model_len=self.engine.max_model_len,
            in_flight=self._app.open_requests,
            stats=self._stats(),
            borrowing=self._loans.borrowing,
            lent=self._loans.lent,
            footprint=self._footprint.state,
        )

    def _stats(self) -> RoutingStats:
        return self.engine.routing_stats(self._role.role, draining=self._draining)

    def _apply(self, desired: DesiredState) -> None:
        self._draining = desired.draining
        self._stop_timeout_s = desired.stop_timeout_s
        self._role.apply(desired)
        self._loans.apply(desired)

    async def __del__(self) -> None:
        """Serve's last call: finish what runs, then stop the engine."""
        if hasattr(self, "_tasks"):
            for task in self._tasks:
                task.cancel()
            await self._loans.take_back()
            await self._http.stop(self._stop_timeout_s)
            await self._loans.give_back()
            await self._role.close()
        engine = getattr(self, "engine", None)
        if engine is not None and engine._engine_client is not None:
            engine._engine_client.shutdown()
        await super().__del__()
