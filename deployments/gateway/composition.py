"""What a gateway consists of, made and wired together; making it imports vLLM."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
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
from loomserve.deployments.gateway.admin import build_admin_api
from loomserve.deployments.gateway.client_endpoint import ClientEndpoint
from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.line_endpoint import LineEndpoint
from loomserve.deployments.gateway.metrics_page import (
    MetricsPage,
    Refresh,
    batch_source,
    keys_source,
    kv_source,
    rebalancing_source,
    routing_source,
)
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.deployments.kvstore.admin import build_kv_router
from loomserve.deployments.kvstore.stores import Stores
from loomserve.deployments.ray_node import node_address, own_node
from loomserve.platform.access.admin import build_keys_router
from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.request_meter import ModelMeter, RequestMeter
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter, usage_path
from loomserve.platform.base.errors import Conflict
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.admin import build_batch_router
from loomserve.platform.config import Batch, Elastic, Server
from loomserve.platform.fleet.messages import (
    BATCH_APP,
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    KvAccess,
)
from loomserve.platform.http.asgi import DirectPosts
from loomserve.platform.http.audit_log import AuditLog
from loomserve.platform.http.console.files import console_routes
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware, respond
from loomserve.platform.http.ingress.exchange import IngressTraces
from loomserve.platform.http.ingress.listeners import Listeners
from loomserve.platform.http.other_gateways import OtherGateways, take_place
from loomserve.platform.lengths.service import LengthPredictions
from loomserve.platform.requests.engine_request import FORWARDED, EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.tracing import RequestTracer
from loomserve.platform.tracing.admin import build_tracing_router
from loomserve.platform.usage.admin import build_usage_router
from loomserve.platform.usage.files import UsageFiles, usage_folder_path
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics

if TYPE_CHECKING:
    from loomserve.deployments.gateway.request_dispatcher import RequestDispatcher

CALL_TIMEOUT_S = 2.0
"""For calls of the controller."""
_MODELS = "/v1/models"
_ENDPOINTS = (*FORWARDED, _MODELS, FILES, BATCHES)


@dataclass(frozen=True, kw_only=True)
class GatewayParts:
    """The parts of a gateway that its Serve deployment works with."""

    node: str | None
    """The name of this node in a cluster with gateways on several."""
    controller: DeploymentHandle
    metrics: GatewayMetrics
    keys: LiveKeys
    requests: RequestMeter
    tokens: TokenMeter
    sequences: ModelMeter
    allowances: Allowances | None
    usage: UsageMeter
    lengths: LengthPredictions
    dispatcher: RequestDispatcher
    routes: ModelRoutes
    lines: LineEndpoint
    others: OtherGateways
    page: MetricsPage
    http: Listeners
    closing: AsyncExitStack
    """Stops the HTTP servers, then saves and closes what is behind them."""


async def compose(
    server: Server,
    internal_token: str,
    kv: KvAccess | None,
    batch: Batch | None,
    elastic: Elastic,
    *,
    isolates_tenants: bool,
    several_nodes: bool,
) -> GatewayParts:
    """Make a gateway's parts, each of which is given those that it uses; none runs yet."""
    registry = CollectorRegistry()
    metrics, key_metrics = GatewayMetrics(registry), KeyMetrics(registry)
    keys = LiveKeys(server)
    controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
    node = await asyncio.to_thread(own_node) if several_nodes else None
    tracer = await _tracer(server, node)

    place = take_place(server)
    allowances = Allowances(node) if node else None
    requests = RequestMeter(place, allowances=allowances)
    tokens = TokenMeter(key_metrics, usage_path(server), counts=place, allowances=allowances)
    sequences = ModelMeter(place, allowances)
    usage = UsageMeter(UsageMetrics(registry), UsageFiles(usage_folder_path(server, Path()), node))
    lengths = LengthPredictions(metrics)

    async def make_ready(model: str) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            reply: Reply[None] = await controller.want.remote(model)
        reply.get()

    dispatcher = (await asyncio.to_thread(_import_dispatcher))(
        internal_token,
        metrics,
        registry,
        idle_timeout_s=server.stream_idle_timeout_s,
        ask_for=make_ready,
        elastic=elastic,
        traced=tracer is not None,
    )
    others = OtherGateways(
        place, internal_token, node_address(), dispatcher.client.get, node_name=node
    )
    routes = ModelRoutes(
        dispatcher.is_set_up,
        [one.name for one in batch.offline_models] if batch else (),
        with_keys=server.asks_for_keys,
        chosen=metrics.alias_chosen,
    )
    clients = ClientEndpoint(
        server,
        routes,
        dispatcher,
        lengths,
        metrics,
        tokens,
        isolates_tenants=isolates_tenants,
        sequences=sequences,
        usage=usage,
    )
    lines = LineEndpoint(
        server,
        keys,
        tokens,
        routes,
        dispatcher,
        isolates_tenants=isolates_tenants,
        usage=usage,
        tracer=tracer,
    )
    batches = BatchProxy(
        serve.get_deployment_handle(BATCH_DEPLOYMENT, BATCH_APP) if batch else None,
        dispatcher.client.session,
        internal_token,
        max_file_bytes=batch.max_file_bytes if batch else server.max_body,
        idle_timeout_s=server.header_timeout_s,
    )

    shared = CollectorRegistry()
    sources: list[Refresh] = [rebalancing_source(shared, controller)]
    if kv is not None:
        sources.append(kv_source(shared, Stores(kv)))
    if batch is not None:
        sources.append(batch_source(shared, batches))
    page = MetricsPage(
        shared,
        routes,
        dispatcher,
        sources,
        own=registry,
        own_sources=[routing_source(metrics, dispatcher.ledger), keys_source(key_metrics, keys)],
        others=others,
    )

    async def pin(
        path: str, body: dict[str, Any], tenant: str | None, receive: Receive
    ) -> tuple[int, bytes]:
        """Have an engine of ``body["model"]`` compute a text's KV; its answer's status and body."""
        route = routes.find(body["model"], None)
        if not route.model.kvstore:
            raise Conflict(f"model {route.name!r} keeps nothing in the KV store", param="model")
        request = EngineRequest(path, body)
        if tenant is not None and isolates_tenants:
            request = request.isolated(tenant)
        forwarded = ModelRequest(route.name, request, request_id=uuid.uuid4().hex)
        return await dispatcher.collect(forwarded, receive)

    def tenants() -> tuple[str, ...]:
        return tuple(key.name for key in keys.all) if isolates_tenants else ()

    async def ask_lane(method: str, *given: Any) -> Any:
        return respond(await batches.ask(method, *given))

    admin = build_admin_api(
        controller,
        build_kv_router(kv, tenants, pin),
        build_batch_router(ask_lane),
        build_usage_router(usage),
        build_keys_router(keys, asked_for=server.asks_for_keys),
        build_tracing_router(server.tracing),
    )
    audit = AuditLog(Path(server.audit_log)) if server.audit_log else None
    app = ingress_middleware(
        _app(clients, batches, routes, page, admin, console=server.console),
        server,
        rejected=metrics.rejected,
        streamed=frozenset({FILES} if batch else ()),
        audit=audit.write if audit is not None else None,
        keys=keys,
        requests=requests,
        traces=IngressTraces(tracer, _ENDPOINTS) if tracer is not None else None,
        endpoints=_ENDPOINTS,
    )
    http = Listeners(app, server, others.counts)

    async def returned_to_controller() -> None:
        if allowances is not None:
            with suppress(Exception):  # a controller that is away finds out by itself
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await controller.gateway_ends.remote(allowances.gateway)

    # From the last line to the first.
    closing = AsyncExitStack()
    if tracer is not None:
        closing.push_async_callback(asyncio.to_thread, tracer.close)
    closing.callback(lengths.close)
    closing.push_async_callback(dispatcher.close)
    closing.push_async_callback(others.close)
    if audit is not None:
        closing.callback(audit.close)
    closing.callback(usage.save)
    closing.callback(tokens.save)
    closing.push_async_callback(returned_to_controller)
    closing.push_async_callback(http.stop)
    return GatewayParts(
        node=node,
        controller=controller,
        metrics=metrics,
        keys=keys,
        requests=requests,
        tokens=tokens,
        sequences=sequences,
        allowances=allowances,
        usage=usage,
        lengths=lengths,
        dispatcher=dispatcher,
        routes=routes,
        lines=lines,
        others=others,
        page=page,
        http=http,
        closing=closing,
    )


def _app(
    clients: ClientEndpoint,
    batches: BatchProxy,
    routes: ModelRoutes,
    page: MetricsPage,
    admin: FastAPI,
    *,
    console: bool,
) -> ASGIApp:
    endpoints = dict[str, ASGIApp].fromkeys(FORWARDED, clients)
    paths: Sequence[BaseRoute] = [
        *(Route(path, app, methods=["POST"]) for path, app in endpoints.items()),
        *(Route(root, batches) for root in (FILES, BATCHES)),
        *(Route(root + "/{rest:path}", batches) for root in (FILES, BATCHES)),
        Route(_MODELS, routes.list_models),
        Route(_MODELS + "/{model:path}", routes.retrieve_model),
        Route("/health", _health),
        Route("/ready", routes.ready),
        # Where KubeRay asks Serve's own proxy.
        Route("/-/healthz", routes.takes_clients),
        Route("/metrics", page.show),
        Mount("/admin/v1", admin),
        *(console_routes() if console else ()),
    ]
    others = Starlette(routes=paths, exception_handlers=exception_handlers)
    # It would redirect to an absolute URL, whose scheme and host a proxy may have otherwise.
    others.router.redirect_slashes = False
    return DirectPosts(endpoints, others)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "alive"})


async def _tracer(server: Server, node: str | None) -> RequestTracer | None:
    """What makes and sends the spans of this process; None: it makes none."""
    if server.tracing is None:
        return None
    # It imports OpenTelemetry's SDK.
    from loomserve.platform.tracing.export import start_tracing

    return await asyncio.to_thread(start_tracing, server.tracing, node=node)


def _import_dispatcher() -> type[RequestDispatcher]:
    """Import vLLM, which takes seconds, and which is not needed to bind the deployment."""
    from loomserve.deployments.gateway.request_dispatcher import RequestDispatcher

    return RequestDispatcher
