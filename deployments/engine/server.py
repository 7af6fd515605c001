"""A replica of a model: one vLLM engine and its own HTTP server, under Ray Serve's care.

The engine's own ASGI app answers requests on the replica's own port, and the gateway forwards bytes
to it. Ray Serve still starts, places, watches, scales and restarts the replica and still chooses it
for each request; only the tokens do not travel as Ray objects, which costs up to half of the
throughput of a small model (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from typing import Any

from ray import serve
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loomserve.deployments.ray_node import node_address, session_folder
from loomserve.platform.base.errors import Forbidden
from loomserve.platform.base.periodic import every
from loomserve.platform.devices.claims import claim, engine_environment, pipeline_environment
from loomserve.platform.disaggregation.engine.prefill_decode import PrefillDecodeLLM
from loomserve.platform.disaggregation.replica.endpoint import PrefillEndpoint
from loomserve.platform.disaggregation.replica.prefill_replicas import PrefillReplicas
from loomserve.platform.engine.executor import executor_class
from loomserve.platform.engine.footprint import Footprint, layer_bytes
from loomserve.platform.engine.hooks import verify
from loomserve.platform.engine.load import LoadMeter
from loomserve.platform.fleet.messages import (
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    INTERNAL_TOKEN_HEADER,
    PREFILL_PATH,
    DesiredState,
    EngineSpec,
    Heartbeat,
)
from loomserve.platform.http.server import HttpServer, listen
from loomserve.platform.lending.replica.endpoint import LoanEndpoint
from loomserve.platform.lending.replica.reconciler import LoanReconciler
from loomserve.platform.state import StageState
from loomserve.platform.state.roles import Role, configured_role
from loomserve.routers.snapshot import RoutingStats

_log = logging.getLogger("ray.serve")

_HEARTBEAT_PERIOD_S = 2.0
_LENDING_PERIOD_S = 1.0


class MeteredEngine(VLLMEngine):  # type: ignore[misc]
    """Ray's vLLM engine with our load meter beside vLLM's own Prometheus metrics."""

    def __init__(self, llm_config: LLMConfig) -> None:
        super().__init__(llm_config)
        self.meter = LoadMeter()

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any
    ) -> PrefillDecodeLLM:
        verify("vllm")
        vllm_engine_config.parallel_config.placement_group = placement_group
        return PrefillDecodeLLM(
            vllm_config=vllm_engine_config,
            executor_class=executor_class(vllm_engine_config),
            log_requests=vllm_engine_args.enable_log_requests,
            log_stats=True,
            stat_loggers=[self.meter.stat_logger],
        )

    @property
    def llm(self) -> PrefillDecodeLLM:
        assert isinstance(self._engine_client, PrefillDecodeLLM), "start() comes first"
        return self._engine_client

    async def call_loans(self, name: str, *given: Any) -> Any:
        """One of the engine's calls that open, end and show loans; errors are plain exceptions."""
        (answer,) = await self.llm.collective_rpc(f"loans.{name}", args=given)
        return answer

    @property
    def max_model_len(self) -> int:
        return int(self._engine_client.model_config.max_model_len)

    def facts(self, path: str, borrowed_bytes: int, kv_bytes: int) -> dict[str, int]:
        """What never changes of a :class:`loomserve.platform.state.FootprintState`."""
        config = self.llm.vllm_config
        model, cache = config.model_config, config.cache_config
        return {
            "layers": model.get_total_num_hidden_layers(),
            "layer_bytes": layer_bytes(path, model.dtype.itemsize),
            "kv_heads": model.get_total_num_kv_heads(),
            # A borrower's blocks are numbered beyond its own memory.
            "block_bytes": (kv_bytes + borrowed_bytes) // max(1, cache.num_gpu_blocks or 0),
            "block_tokens": cache.block_size,
        }

    def routing_stats(self, role: Role, *, draining: bool) -> RoutingStats:
        config = self.llm.vllm_config
        blocks = config.cache_config.num_gpu_blocks or 0
        return RoutingStats(
            load=self.meter.read(self.llm.turnaround),
            max_running=config.scheduler_config.max_num_seqs,
            kv_capacity_tokens=blocks * config.cache_config.block_size,
            draining=draining,
            role=role,
        )


class NoNodeInit(CallbackBase):  # type: ignore[misc]
    """Tells Ray's engine that the weights need no fetching."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class GuardedApp:
    """The engine's app, for the platform's own processes, counting its open requests."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self.open_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        presented = dict(scope["headers"]).get(INTERNAL_TOKEN_HEADER.encode(), b"")
        if not hmac.compare_digest(presented, self._token):
            error = Forbidden("this port is for the gateway; ask the server's own address")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        self.open_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1


class EngineServer(LLMServer):  # type: ignore[misc]
    """Serve's deployment class of a model."""

    engine: MeteredEngine

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, llm_config: LLMConfig, spec: dict[str, Any]
    ) -> None:
        began = time.monotonic()
        self._spec = EngineSpec.model_validate(spec)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._draining = False
        self._stop_timeout_s = self._spec.drain_timeout_s
        self._claim = await claim(
            self._spec.model.name,
            # A pipeline is its model's only replica, so its first device stands for all.
            self._spec.devices[:1] if self._spec.stage_layers else self._spec.devices,
            session_folder() / "loomserve-devices",
            self._spec.drain_timeout_s + 15,
        )
        # Engine processes inherit the environment of the replica that starts them.
        os.environ.update(
            pipeline_environment(self._spec.devices, self._spec.stage_layers)
            if self._spec.stage_layers
            else engine_environment(self._claim.device)
        )
        await super().__init__(llm_config, engine_cls=MeteredEngine)
        self._prefill_replicas = PrefillReplicas(
            self._spec.internal_token, self._spec.model.router.load_limit
        )
        if self._spec.model.roles is not None:
            self.engine.llm.local_prompt_tokens = self._spec.model.roles.local_prompt_tokens
        self._take_role(configured_role(self._spec.model, self._claim.device.name))
        app = await self.engine.build_asgi_app()
        app.router.routes.append(Route(PREFILL_PATH, PrefillEndpoint(self.engine.llm)))
        self._borrowed, self._lent = self._loans()
        app.router.routes += self._lent.routes if self._lent else []
        self._app = GuardedApp(app, self._spec.internal_token)
        host = node_address()
        sock = listen(host, 0)
        self._address = f"{host}:{sock.getsockname()[1]}"
        self._http = HttpServer(self._app, sock, protocol=HttpToolsProtocol)
        await self._http.start()
        self._footprint = Footprint(
            self.engine.facts(
                self._spec.path,
                self._spec.lending.borrow_bytes if self._spec.lending else 0,
                self._spec.model.kv_cache_memory,
            ),
            start_s=time.monotonic() - began,
            on_cpu=self._claim.device.kind == "cpu",
        )
        self._measuring = asyncio.create_task(self._footprint.keep())
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
        self._reporting = asyncio.create_task(
            # The controller may be restarting; the next heartbeat will reach it.
            every(_HEARTBEAT_PERIOD_S, self._send_heartbeat, failed=lambda _: None)
        )
        self._lending = asyncio.create_task(
            # Serve looks after an engine that is dead; all else is tried again.
            every(_LENDING_PERIOD_S, self._reconcile_loans, failed=_warn_of_loans)
        )

    def _loans(self) -> tuple[LoanReconciler | None, LoanEndpoint | None]:
        lending, me = self._spec.lending, self._replica_id
        if lending is None:
            return None, None
        model, keeper, endpoint = self._spec.model.name, None, None
        if lending.borrow_bytes:
            keeper = LoanReconciler(
                self.engine.call_loans,
                model=model,
                replica_id=me,
                most=lending.lenders,
                internal_token=self._spec.internal_token,
                drain_timeout_s=self._spec.drain_timeout_s,
            )
        if lending.lend_bytes:
            endpoint = LoanEndpoint(self.engine.call_loans, model=model, replica_id=me)
        return keeper, endpoint

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

    def report(self) -> Heartbeat:
        return Heartbeat(
            model=self._spec.model,
            replica_id=self._replica_id,
            device=self._claim.device.name,
            stages=tuple(
                StageState(device=device.name, layers=layers)
                for device, layers in zip(
                    self._spec.devices[: len(self._spec.stage_layers)],
                    self._spec.stage_layers,
                    strict=True,
                )
            ),
            address=self._address,
            pid=os.getpid(),
            max_model_len=self.engine.max_model_len,
            in_flight=self._app.open_requests,
            stats=self._stats(),
            borrowing=self._borrowed.state if self._borrowed else None,
            lent=self._lent.lent if self._lent else (),
            footprint=self._footprint.state,
        )

    def _stats(self) -> RoutingStats:
        return self.engine.routing_stats(self._role, draining=self._draining)

    async def _send_heartbeat(self) -> None:
        self._apply(
            await asyncio.wait_for(self._controller.report.remote(self.report()), timeout=5)
        )

    def _apply(self, desired: DesiredState) -> None:
        self._draining = desired.draining
        self._stop_timeout_s = desired.stop_timeout_s
        self._prefill_replicas.set_replicas(desired.peers)
        self._take_role(desired.role)
        for loans in (self._borrowed, self._lent):
            if loans is not None:
                loans.apply(desired)

    async def _reconcile_loans(self) -> None:
        if self._borrowed:
            await self._borrowed.reconcile(time.monotonic())
        if self._lent:
            await self._lent.reconcile()

    def _take_role(self, role: Role) -> None:
        self._role = role
        hands_over = role is Role.DECODE
        self.engine.llm.remote = self._prefill_replicas.prefill if hands_over else None

    async def __del__(self) -> None:
        """Serve's last call: finish what runs, then stop the engine."""
        if hasattr(self, "_http"):
            self._reporting.cancel()
            self._lending.cancel()
            self._measuring.cancel()
            if self._lent:
                with contextlib.suppress(Exception):  # the engine may be dead
                    await self._lent.close()
            await self._http.stop(self._stop_timeout_s)
            if self._borrowed:
                await self._borrowed.close()
            await self._prefill_replicas.close()
        engine = getattr(self, "engine", None)
        if engine is not None and engine._engine_client is not None:
            engine._engine_client.shutdown()
        await super().__del__()


def _warn_of_loans(error: Exception) -> None:
    _log.warning("loans could not be looked after: %r", error)
