"""The gateway: the platform's front door and multi-model ingress.

It listens on the server's address itself. A request crosses two processes, this one and the
engine's; docs/performance.md says why no proxy stands before it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from loomserve.deployments.admin import build_admin_api
from loomserve.deployments.answer_length import AnswerLength
from loomserve.deployments.background import refuse_background
from loomserve.deployments.base import (
    BATCH_APP,
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    ENGINE_DEPLOYMENT,
    INTERNAL_TOKEN_HEADER,
    BatchLine,
    KvAccess,
    ModelRoute,
    Routes,
)
from loomserve.deployments.batch_admin import build_batch_router
from loomserve.deployments.batch_proxy import BATCHES, FILES, BatchProxy
from loomserve.deployments.deadline import ENDPOINTS, refuse_deadline, with_deadline
from loomserve.deployments.expected_tokens import refuse_expected, with_expected
from loomserve.deployments.fleet import unknown_model_message
from loomserve.deployments.forward import (
    CollectedAnswer,
    Forwarder,
    ForwardRequest,
    never_gone,
)
from loomserve.deployments.front_door import exception_handlers, front_door
from loomserve.deployments.http_protocol import bounded_protocol
from loomserve.deployments.http_server import HttpServer, listen
from loomserve.deployments.kv_admin import build_kv_router
from loomserve.deployments.kv_request import isolate, refuse_kv_transfer
from loomserve.deployments.kv_store import read_usage
from loomserve.deployments.length_predictions import LengthPredictions, Predicted, counts_once
from loomserve.deployments.line_endpoint import LineEndpoint
from loomserve.platform.access.key_models import check_model
from loomserve.platform.config import ApiKey, Batch, Server
from loomserve.platform.errors import (
    BadRequest,
    Conflict,
    RequestError,
    TooManyRequests,
    Unavailable,
    UnknownModel,
)
from loomserve.platform.metrics.batch import BatchMetrics
from loomserve.platform.metrics.exposition import merge
from loomserve.platform.metrics.gateway import GatewayMetrics
from loomserve.platform.metrics.kvstore import KvStoreMetrics
from loomserve.platform.metrics.rebalancing import RebalancingMetrics
from loomserve.platform.rebalancing.reports import RebalancingState
from loomserve.platform.state import BatchLaneState, KvState, ModelStatus
from loomserve.routers.in_flight import IN_FLIGHT

_log = logging.getLogger("ray.serve")

# vLLM's endpoints that take one request and keep nothing between requests.
FORWARDED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/tokenize",
    "/v1/detokenize",
)
_ENGINE_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
_SERVING = frozenset({ModelStatus.READY, ModelStatus.DEGRADED})
_SCRAPE_TIMEOUT_S = 3.0
_NO_VERSION = -1


class Gateway:
    """Serve's deployment class of the front door.

    It is not a subclass of Ray Serve LLM's ``OpenAiIngress``, of which only the list of models
    would be left once bytes are forwarded; importing that class costs 10 s and 500 MB, for it
    imports vLLM.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        server: dict[str, Any],
        internal_token: str,
        kv: dict[str, Any] | None,
        batch: dict[str, Any] | None,
    ) -> None:
        self._server = Server.model_validate(server)
        self._kv = KvAccess.model_validate(kv) if kv else None
        self._internal_token = internal_token
        self._routes: dict[str, ModelRoute] = {}
        self._handles: dict[str, DeploymentHandle] = {}
        self._open: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._metrics = GatewayMetrics(self._registry)
        self._kv_metrics = KvStoreMetrics(self._registry) if kv else None
        self._rebalancing_metrics = RebalancingMetrics(self._registry)
        self._lengths = LengthPredictions(self._metrics)
        self._forwarder = Forwarder(internal_token, self._metrics)
        self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
        self._lines = LineEndpoint(self._server, self._route, self._isolated, self._collect)
        options = Batch.model_validate(batch) if batch else None
        self._batch_only = frozenset(one.name for one in options.static_models) if options else ()
        self._batch_metrics = BatchMetrics(self._registry) if batch else None
        self._batches = BatchProxy(
            serve.get_deployment_handle(BATCH_DEPLOYMENT, BATCH_APP) if batch else None,
            self._forwarder.session,
            internal_token,
            max_file_bytes=options.max_file_bytes if options else self._server.max_body,
            idle_timeout_s=self._server.header_timeout_s,
        )
        app = front_door(
            self._build_app(),
            self._server,
            rejected=self._metrics.rejected,
            streamed=frozenset({FILES}) if batch else frozenset(),
        )
        sock = listen(self._server.host, self._server.port, shared=True)
        protocol = bounded_protocol(self._server.header_timeout_s, self._server.max_connections)
        self._http = HttpServer(app, sock, protocol=protocol)
        # A gateway that is started anew must not answer before it knows the models.
        version = self._learn(await self._controller.watch.remote(_NO_VERSION))
        self._following = asyncio.create_task(self._follow_controller(version))
        await self._http.start()

    async def check_health(self) -> None:
        if not self._http.alive or self._following.done():
            raise RuntimeError("the gateway's HTTP server or its view of the models has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            self._following.cancel()
            await self._http.stop(self._server.drain_timeout_s)
            await self._forwarder.close()
            self._lengths.close()

    def _build_app(self) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, self._endpoint(path), methods=["POST"]) for path in FORWARDED),
                *(Route(root, self._batches) for root in (FILES, BATCHES)),
                *(Route(root + "/{rest:path}", self._batches) for root in (FILES, BATCHES)),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._retrieve_model),
                Route("/health", _health),
                Route("/ready", self._ready),
                Route("/metrics", self._expose_metrics),
                Mount("/admin/v1", self._admin_api()),
            ],
            exception_handlers=exception_handlers,
        )

    def _admin_api(self) -> FastAPI:
        return build_admin_api(
            self._controller,
            build_kv_router(self._kv, self.pin),
            build_batch_router(self._batches.ask),
        )

    # The models

    async def _follow_controller(self, version: int) -> None:
        while True:
            try:
                version = self._learn(await self._controller.watch.remote(version))
            except Exception as error:
                # Serve restarts the controller; until then the last routes hold.
                _log.warning("the controller does not answer: %r", error)
                await asyncio.sleep(0.5)

    def _learn(self, answer: dict[str, Any]) -> int:
        routes = Routes.model_validate(answer)
        self._routes = {route.name: route for route in routes.models}
        self._metrics.set_models(
            {route.name: [replica.id for replica in route.replicas] for route in routes.models}
        )
        self._lengths.set_models(
            {route.name: route.predictor for route in routes.models if route.predictor}
        )
        self._handles = {
            route.name: self._handles.get(route.name) or _handle(route)
            for route in routes.models
            if route.replicas
        }
        return routes.version

    def _route(self, model: object, key: ApiKey | None) -> ModelRoute:
        if model is None and len(self._routes) == 1:
            model = next(iter(self._routes))
        if not isinstance(model, str) or not model:
            raise BadRequest(
                f"say which model, one of: {', '.join(sorted(self._routes))}", param="model"
            )
        route = self._routes.get(model)
        if model in self._batch_only:
            raise UnknownModel(
                f"The model {model!r} answers batches only: send its requests in a file, to "
                "/v1/batches.",
                param="model",
            )
        if route is None:
            raise UnknownModel(unknown_model_message(model, self._routes), param="model")
        check_model(key, model)
        if route.status is ModelStatus.UNLOADING:
            raise UnknownModel(f"The model {model!r} is being unloaded.", param="model")
        if not route.replicas:
            raise Unavailable(
                f"model {model!r} is {route.status}; try again shortly",
                reason="model_not_ready",
                retry_after_s=5,
            )
        return route

    def _refuse_beyond_limit(self, route: ModelRoute) -> None:
        if self._open[route.name] >= route.max_concurrent_requests:
            raise TooManyRequests(
                f"model {route.name!r} already has {self._open[route.name]} requests; "
                "try again shortly",
                reason="model_overloaded",
                retry_after_s=1,
            )

    # The endpoints

    def _endpoint(self, path: str) -> Any:
        # Starlette treats an object that is not a function as an ASGI app, which may stream.
        return _AsgiEndpoint(self, path)

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        parsed = _parse(state["body"])
        for refuse in (refuse_kv_transfer, refuse_deadline, refuse_background, refuse_expected):
            refuse(parsed)
        route = self._route(parsed.get("model"), state.get("api_key"))
        self._refuse_beyond_limit(route)
        handle = self._handles[route.name]
        started, slo_ms = time.monotonic(), state.get("slo_ms")
        deadline = time.time() + slo_ms / 1000 if slo_ms is not None and path in ENDPOINTS else None
        self._open[route.name] += 1
        status = 499  # as nginx says it: the client went away before there was an answer
        length = AnswerLength() if route.predictor and counts_once(parsed) else None

        async def watched_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif length is not None:
                length.feed(message.get("body", b""))
            await send(message)

        try:
            predicted = (
                await self._lengths.predict(route.name, parsed) if path in ENDPOINTS else None
            )
            request = self._request(route, path, parsed, state, deadline, predicted)
            await self._forwarder.forward(request, handle, receive, watched_send)
            if predicted and length and (tokens := length.tokens):
                self._lengths.ended(route.name, predicted, tokens)
        except RequestError as error:
            status = error.status
            raise
        finally:
            self._open[route.name] -= 1
            took_s = time.monotonic() - started
            self._metrics.finished(route.name, path, status, took_s, slo_ms)

    def _request(
        self,
        route: ModelRoute,
        path: str,
        sent: dict[str, Any],
        state: Mapping[str, Any],
        deadline: float | None,
        predicted: Predicted | None,
    ) -> ForwardRequest:
        """A client's request with all that the platform adds to it."""
        key = state.get("api_key")
        parsed = self._isolated(sent, key, path)
        if deadline is not None:
            parsed = with_deadline(parsed, deadline)
        if predicted is not None:
            parsed = with_expected(parsed, predicted.expected)
        return ForwardRequest(
            model=route.name,
            policy=route.policy,
            path=_ENGINE_PATHS.get(path, path),
            body=state["body"] if parsed is sent else json.dumps(parsed).encode(),
            parsed=parsed,
            request_id=state["request_id"],
            content_type="application/json",
            expected_tokens=predicted.prediction.tokens if predicted else None,
            refuse_after=deadline if key is not None and key.refuse_late else None,
        )

    def _isolates(self, tenant: str) -> bool:
        return self._kv is not None and tenant in self._kv.isolated_tenants

    def _isolated(self, request: dict[str, Any], key: ApiKey | None, path: str) -> dict[str, Any]:
        if key is not None and self._isolates(key.name) and path not in _ENGINE_PATHS:
            return isolate(request, key.name)
        return request

    async def complete_line(self, line: dict[str, Any]) -> tuple[int, bytes]:
        """Have a batch's line computed; its answer's status and body. The batch lane calls it."""
        return await self._lines.complete(BatchLine.model_validate(line))

    async def _collect(
        self, request: ForwardRequest, receive: Receive = never_gone
    ) -> tuple[int, bytes]:
        """The answer to a request of the platform's own, which no client follows."""
        answer = CollectedAnswer()
        handle = self._handles[request.model]
        await self._forwarder.forward(request, handle, receive, answer.send)
        return answer.status, bytes(answer.body)

    async def pin(
        self, path: str, body: dict[str, Any], tenant: str | None, receive: Receive
    ) -> tuple[int, bytes]:
        """Let an engine of ``body["model"]`` pass over a text; its answer's status and body."""
        route = self._route(body["model"], None)
        if not route.kvstore:
            raise Conflict(f"model {route.name!r} keeps nothing in the KV store", param="model")
        if tenant is not None and self._isolates(tenant):
            body = isolate(body, tenant)
        request = ForwardRequest(
            model=route.name,
            policy=route.policy,
            path=path,
            body=json.dumps(body).encode(),
            parsed=body,
            request_id=uuid.uuid4().hex,
            content_type="application/json",
        )
        return await self._collect(request, receive)

    async def _list_models(self, request: Request) -> Response:
        key = request.scope["state"].get("api_key")
        allowed = [
            route
            for route in self._routes.values()
            if route.status is not ModelStatus.UNLOADING
            and (key is None or not key.models or route.name in key.models)
        ]
        return JSONResponse({"object": "list", "data": [_card(route) for route in allowed]})

    async def _retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._routes:
            raise UnknownModel(unknown_model_message(name, self._routes), param="model")
        return JSONResponse(_card(self._routes[name]))

    async def _ready(self, request: Request) -> Response:
        models = {name: route.status for name, route in self._routes.items()}
        ready = bool(models) and all(status in _SERVING for status in models.values())
        return JSONResponse(
            {"status": "ready" if ready else "not ready", "models": models},
            status_code=200 if ready else 503,
            headers={} if ready else {"Retry-After": "5"},
        )

    async def _expose_metrics(self, request: Request) -> Response:
        self._metrics.set_decisions(IN_FLIGHT.decisions())
        if self._kv is not None and self._kv_metrics is not None:
            self._kv_metrics.set_state(await _kv_state(self._kv))
        if self._batch_metrics is not None:
            self._batch_metrics.set_state(await self._batch_state())
        self._rebalancing_metrics.set_state(await self._rebalancing_state())
        parts: list[tuple[dict[str, str], str | None]] = [
            ({}, generate_latest(self._registry).decode())
        ]
        parts += await asyncio.gather(
            *(
                self._scrape(route.name, replica.id, replica.device, replica.address)
                for route in self._routes.values()
                for replica in route.replicas
            )
        )
        return Response(
            await asyncio.to_thread(merge, parts),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _batch_state(self) -> BatchLaneState | None:
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                return BatchLaneState.model_validate(await self._batches.ask("state"))
        except (Unavailable, TimeoutError):
            return None

    async def _rebalancing_state(self) -> RebalancingState | None:
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                return RebalancingState.model_validate(
                    await self._controller.rebalancing.remote("state")
                )
        except (RayError, RayServeException, ValidationError, TimeoutError):
            return None

    async def _scrape(
        self, model: str, replica_id: str, device: str, address: str
    ) -> tuple[dict[str, str], str | None]:
        labels = {"model": model, "replica": replica_id, "device": device}
        try:
            async with self._forwarder.session.get(
                f"http://{address}/metrics",
                headers={INTERNAL_TOKEN_HEADER: self._internal_token},
                timeout=aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_S),
            ) as response:
                return labels, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return labels, None


async def _kv_state(kv: KvAccess) -> KvState | None:
    try:
        return await read_usage(kv.address)
    except Unavailable:
        return None


class _AsgiEndpoint:
    def __init__(self, gateway: Gateway, path: str) -> None:
        self._gateway, self._path = gateway, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.answer(self._path, scope, receive, send)


def _handle(route: ModelRoute) -> DeploymentHandle:
    return serve.get_deployment_handle(ENGINE_DEPLOYMENT, route.app)


def _card(route: ModelRoute) -> dict[str, Any]:
    return {
        "id": route.name,
        "object": "model",
        "created": 0,
        "owned_by": "loomserve",
        "max_model_len": route.max_model_len,
        "status": route.status,
    }


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest('the body must be a JSON object, such as {"model": …, "messages": […]}')
    return parsed


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "alive"})
