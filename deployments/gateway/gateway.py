"""The gateway: the platform's HTTP server and multi-model ingress.

It listens on the server's address itself, and has vLLM's front ends of all models. A request
crosses two processes, this one and the engine's; docs/performance.md says why no proxy stands
before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive

from loomserve.deployments.batch.proxy import BATCHES, FILES, BatchProxy
from loomserve.deployments.ending import ended_with_caller
from loomserve.deployments.gateway.admin import build_admin_api
from loomserve.deployments.gateway.answering import Answering, ForwardRequest
from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.deployments.gateway.metrics_page import (
    MetricsPage,
    batch_source,
    keys_source,
    kv_source,
    rebalancing_source,
    routing_source,
)
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.deployments.gateway.store_readings import follow_stores
from loomserve.deployments.kvstore.admin import build_kv_router
from loomserve.deployments.kvstore.stores import stores_of
from loomserve.deployments.ray_node import keep_calls_on_node, node_address, own_node
from loomserve.deployments.serve_logging import log_requests
from loomserve.platform.access.admin import build_keys_router
from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.metrics import KeyMetrics
from loomserve.platform.access.model_meter import ModelMeter
from loomserve.platform.access.policy.bank import LimitAnswer, LimitReport
from loomserve.platform.access.request_meter import RequestMeter
from loomserve.platform.access.shared_counts import LOOK_S, OnlyOne
from loomserve.platform.access.token_meter import SAVE_S, TokenMeter, usage_path
from loomserve.platform.base.errors import Conflict
from loomserve.platform.base.generation import LatestGeneration
from loomserve.platform.base.periodic import every
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.admin import build_batch_router
from loomserve.platform.config import Batch, Elastic, Server
from loomserve.platform.elastic.waiting_room import AskFor
from loomserve.platform.fleet.messages import (
    BATCH_APP,
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    KvAccess,
    LineRequest,
    Routes,
)
from loomserve.platform.fleet.nodes import GatewayHeartbeat, GatewayOrders
from loomserve.platform.http.audit_log import AuditLog
from loomserve.platform.http.console.files import console_routes
from loomserve.platform.http.direct_posts import DirectPosts
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware, respond
from loomserve.platform.http.ingress.listeners import Listeners
from loomserve.platform.http.ingress.traces import IngressTraces
from loomserve.platform.http.other_front_ends import OtherFrontEnds, take_place
from loomserve.platform.lengths.service import LengthPredictions
from loomserve.platform.requests.engine_request import FORWARDED, EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.tracing import RequestTracer
from loomserve.platform.tracing.admin import build_tracing_router
from loomserve.platform.usage.admin import build_usage_router
from loomserve.platform.usage.files import UsageFiles, usage_folder_path
from loomserve.platform.usage.meter import UsageMeter
from loomserve.platform.usage.metrics import UsageMetrics

if TYPE_CHECKING:
    from loomserve.deployments.gateway.front_ends import ModelFrontEnds

_log = logging.getLogger("ray.serve")

_MODELS = "/v1/models"
_ENDPOINTS = (*FORWARDED, _MODELS, FILES, BATCHES)
_NO_VERSION = -1
_REPORT_TIMEOUT_S = 2.0


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
        self._server = Server.model_validate(server)
        log_requests(self._server.log_format)
        self._keys = LiveKeys(self._server)
        self._kv = KvAccess.model_validate(kv) if kv else None
        place = take_place(self._server)
        registry = CollectorRegistry()
        self._metrics = GatewayMetrics(registry)
        key_metrics = KeyMetrics(registry)
        self._node = await asyncio.to_thread(own_node) if several_nodes else None
        self._allowances = allowances = Allowances(self._node) if self._node else None
        self._meter = TokenMeter(
            key_metrics, usage_path(self._server), counts=place, allowances=allowances
        )
        self._usage = _usage_meter(self._server, registry, self._node)
        self._requests = RequestMeter(place, allowances=allowances)
        self._lengths = LengthPredictions(self._metrics)
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
        self._tracer = await _tracer(self._server, self._node)
        self._forwarder = await _answering(
            *(self._server, internal_token, self._metrics, registry),
            traced=self._tracer is not None,
            ask_for=_asking(self._controller),
            elastic=Elastic.model_validate(elastic or {}),
        )
        self._others = OtherFrontEnds(
            place, internal_token, node_address(), self._forwarder.get, node_name=self._node
        )
        options = Batch.model_validate(batch) if batch else None
        self._routes = ModelRoutes(
            self._forwarder.is_set_up,
            [one.name for one in options.offline_models] if options else (),
            with_keys=self._server.asks_for_keys,
            chosen=self._metrics.alias_chosen,
        )
        self._isolates_tenants = isolates_tenants
        self._sequences = ModelMeter(place, allowances)
        self._clients = ClientEndpoint(
            *(self._routes, self._forwarder, self._lengths, self._metrics, self._meter),
            isolates_tenants=isolates_tenants,
            max_sequences=self._server.max_sequences,
            media_hosts=self._server.media_hosts,
            sequences=self._sequences,
            usage=self._usage,
        )
        self._lines = LineEndpoint(
            *(self._server, self._keys, self._meter, self._routes, self._forwarder),
            isolates_tenants=isolates_tenants,
            usage=self._usage,
            tracer=self._tracer,
        )
        self._batches = BatchProxy(
            serve.get_deployment_handle(BATCH_DEPLOYMENT, BATCH_APP) if batch else None,
            self._forwarder.session,
            internal_token,
            max_file_bytes=options.max_file_bytes if options else self._server.max_body,
            idle_timeout_s=self._server.header_timeout_s,
        )
        page = self._metrics_page(registry, key_metrics, with_batches=options is not None)
        self._audit = AuditLog(Path(self._server.audit_log)) if self._server.audit_log else None
        self._http = self._listeners(page, streamed={FILES} if batch else set())
        # A gateway that restarts must not answer before it knows the models.
        self._controllers, self._id = LatestGeneration(), uuid.uuid4().hex
        self._version = self._apply(await self._controller.watch.remote(_NO_VERSION, self._id))
        self._following = asyncio.create_task(
            every(0.0, self._follow_controller, failed=self._keep_routes, retry_s=0.5)
        )
        self._keeping = [
            asyncio.create_task(self._keys.follow()),
            _saving(SAVE_S, self._meter.save),
            _saving(self._server.usage.interval_s, self._usage.save),
            asyncio.create_task(every(LOOK_S, self._look)),
        ]
        await self._others.listen(page.own, self._http.drain)
        if allowances is not None:
            self._keeping.append(asyncio.create_task(allowances.keep(self._report)))
        if self._kv is not None and self._kv.each_node:
            follow = follow_stores(stores_of(self._kv), self._forwarder.set_stores)
            self._keeping.append(asyncio.create_task(follow))
        await self._http.start()

    async def check_health(self) -> None:
        if self._http.drains:
            return
        if not self._http.alive or any(task.done() for task in (self._following, *self._keeping)):
            raise RuntimeError("the gateway's HTTP server or its view of models or keys has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            for task in (self._following, *self._keeping):
                task.cancel()
            await self._http.stop()
            if self._allowances is not None:
                await self._say_that_it_ends(self._allowances.gateway)
            self._meter.save()
            self._usage.save()
            if self._audit is not None:
                self._audit.close()
            await self._others.close()
            await self._forwarder.close()
            self._lengths.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    async def _look(self) -> None:
        """Take over what other front ends have counted."""
        counts = self._others.counts
        counts.look()
        if not isinstance(counts, OnlyOne):
            self._requests.look(self._keys.all)
            self._meter.look(self._keys.all)

    async def _report(self, limits: LimitReport) -> LimitAnswer:
        """Tell the controller of this gateway; returns what it may use."""
        heartbeat = GatewayHeartbeat(self._others.address, self._sequences.open.total(), limits)
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            orders: GatewayOrders = await self._controller.report_gateway.remote(heartbeat)
        self._controllers.check(orders.generation)
        self._others.elsewhere = orders.others
        return orders.limits

    async def _say_that_it_ends(self, gateway: str) -> None:
        with contextlib.suppress(Exception):  # a controller that is away finds out by itself
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self._controller.gateway_ends.remote(gateway)

    def _metrics_page(
        self, own: CollectorRegistry, key_metrics: KeyMetrics, *, with_batches: bool
    ) -> MetricsPage:
        registry = CollectorRegistry()
        sources = [rebalancing_source(registry, self._controller)]
        if self._kv is not None:
            sources.append(kv_source(registry, stores_of(self._kv)))
        if with_batches:
            sources.append(batch_source(registry, self._batches))
        return MetricsPage(
            *(registry, self._routes, self._forwarder, sources),
            own=own,
            own_sources=[
                routing_source(self._metrics, self._forwarder.ledger),
                keys_source(key_metrics, self._keys),
            ],
            others=self._others,
        )

    def _listeners(self, page: MetricsPage, streamed: Collection[str]) -> Listeners:
        server = self._server
        app = ingress_middleware(
            self._build_app(page),
            server,
            rejected=self._metrics.rejected,
            streamed=frozenset(streamed),
            audit=self._audit.write if self._audit is not None else None,
            keys=self._keys,
            requests=self._requests,
            traces=_traces(self._tracer),
            endpoints=_ENDPOINTS,
        )
        return Listeners(app, server, self._others.counts)

    def _build_app(self, page: MetricsPage) -> ASGIApp:
        endpoints = {path: self._clients.at(path) for path in FORWARDED}
        others = _routed(
            [
                *(Route(path, app, methods=["POST"]) for path, app in endpoints.items()),
                *(Route(root, self._batches) for root in (FILES, BATCHES)),
                *(Route(root + "/{rest:path}", self._batches) for root in (FILES, BATCHES)),
                Route(_MODELS, self._routes.list_models),
                Route(_MODELS + "/{model:path}", self._routes.retrieve_model),
                Route("/health", _health),
                Route("/ready", self._routes.ready),
                # Where KubeRay asks Serve's own proxy.
                Route("/-/healthz", self._routes.takes_clients),
                Route("/metrics", page.show),
                Mount("/admin/v1", self._admin_api()),
                *(console_routes() if self._server.console else ()),
            ],
        )
        return DirectPosts(endpoints, others)

    def _admin_api(self) -> FastAPI:
        return build_admin_api(
            self._controller,
            build_kv_router(self._kv, self._tenants, self.pin),
            build_batch_router(self._ask_lane),
            build_usage_router(self._usage),
            build_keys_router(self._keys, asked_for=self._server.asks_for_keys),
            build_tracing_router(self._server.tracing),
        )

    def _tenants(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys.all) if self._isolates_tenants else ()

    async def _ask_lane(self, method: str, *given: Any) -> Any:
        return respond(await self._batches.ask(method, *given))

    # The models

    async def _follow_controller(self) -> None:
        """Take in the next routes; the controller answers once there are any."""
        routes = await ended_with_caller(self._controller.watch.remote(self._version, self._id))
        self._version = self._apply(routes)

    def _keep_routes(self, error: Exception) -> None:
        # Serve restarts the controller; until then the last routes hold.
        _log.warning("the controller does not answer: %r", error)

    def _apply(self, routes: Routes) -> int:
        self._controllers.check(routes.generation)
        self._routes.apply(routes.models, routes.aliases)
        self._routes.drained = self._node in routes.drained_nodes
        self._forwarder.set_models(routes.models)
        self._metrics.set_models(
            {route.name: [replica.id for replica in route.replicas] for route in routes.models}
        )
        self._metrics.adapters.set_adapters(routes.adapters)
        self._lengths.set_models(
            {route.name: route.predictor for route in routes.models if route.predictor}
        )
        return routes.version

    async def complete_line(self, line: dict[str, Any]) -> tuple[int, bytes]:
        """Have a batch's line computed, for the batch lane; the answer's status and body."""
        return await self._lines.complete(LineRequest.model_validate(line))

    async def pin(
        self, path: str, body: dict[str, Any], tenant: str | None, receive: Receive
    ) -> tuple[int, bytes]:
        """Have an engine of ``body["model"]`` compute a text's KV; its answer's status and body."""
        route = self._routes.find(body["model"], None)
        if not route.kvstore:
            raise Conflict(f"model {route.name!r} keeps nothing in the KV store", param="model")
        request = EngineRequest(path, body)
        if tenant is not None and self._isolates_tenants:
            request = request.isolated(tenant)
        forwarded = ForwardRequest(route.name, request, request_id=uuid.uuid4().hex)
        return await self._forwarder.collect(forwarded, receive)


def _saving(period_s: float, save: Callable[[], None]) -> asyncio.Task[None]:
    return asyncio.create_task(every(period_s, lambda: asyncio.to_thread(save)))


def _usage_meter(server: Server, registry: CollectorRegistry, node: str | None) -> UsageMeter:
    files = UsageFiles(usage_folder_path(server, Path()), node)
    return UsageMeter(UsageMetrics(registry), files)


def _routed(routes: list[BaseRoute]) -> Starlette:
    app = Starlette(routes=routes, exception_handlers=exception_handlers)
    # It would redirect to an absolute URL, whose scheme and host a proxy may have otherwise.
    app.router.redirect_slashes = False
    return app


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "alive"})


def _asking(controller: DeploymentHandle) -> AskFor:
    """Has the controller make a model ready; raises its refusal."""

    async def ask_for(model: str) -> None:
        async with asyncio.timeout(_REPORT_TIMEOUT_S):
            reply: Reply[None] = await controller.want.remote(model)
        reply.get()

    return ask_for


async def _tracer(server: Server, node: str | None) -> RequestTracer | None:
    """What makes and sends the spans of this process; None: it makes none."""
    if server.tracing is None:
        return None
    # It imports OpenTelemetry's SDK.
    from loomserve.platform.tracing.export import start_tracing

    return await asyncio.to_thread(start_tracing, server.tracing, node=node)


def _traces(tracer: RequestTracer | None) -> IngressTraces | None:
    if tracer is None:
        return None
    return IngressTraces(tracer, _ENDPOINTS)


async def _answering(
    server: Server,
    internal_token: str,
    metrics: GatewayMetrics,
    registry: CollectorRegistry,
    *,
    traced: bool,
    ask_for: AskFor,
    elastic: Elastic,
) -> Answering:
    front_ends = await asyncio.to_thread(_import_front_ends)
    return front_ends(
        *(internal_token, metrics, registry),
        idle_timeout_s=server.stream_idle_timeout_s,
        ask_for=ask_for,
        elastic=elastic,
        traced=traced,
    )


def _import_front_ends() -> type[ModelFrontEnds]:
    """Import vLLM, which takes seconds, and which whoever only binds this class does not need."""
    from loomserve.deployments.gateway.front_ends import ModelFrontEnds

    return ModelFrontEnds
