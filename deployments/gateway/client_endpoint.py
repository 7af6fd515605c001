"""The endpoints that clients ask: one request in, an engine's answer out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loomserve.deployments.gateway.answering import Answering, ForwardRequest
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.access.sequences import ModelMeter
from loomserve.platform.access.token_meter import TokenMeter
from loomserve.platform.base.errors import RequestError
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.lengths.service import LengthPredictions
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.tracing import RequestTrace
from loomserve.platform.usage.meter import UsageMeter

# As nginx says it: the client went away before there was an answer.
_CLIENT_CLOSED_REQUEST = 499


class ClientEndpoint:
    """Answers clients' requests to all of vLLM's endpoints, within each model's limit."""

    def __init__(
        self,
        server: Server,
        routes: ModelRoutes,
        answering: Answering,
        lengths: LengthPredictions,
        metrics: GatewayMetrics,
        meter: TokenMeter,
        *,
        isolates_tenants: bool,
        sequences: ModelMeter | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """
        Args:
            isolates_tenants: no API key reads another's KV blocks.
            sequences: counts those of each model; None: this endpoint's alone.
            usage: keeps what API keys use; None: nobody does.
        """
        self._routes = routes
        self._answering = answering
        self._lengths = lengths
        self._metrics = metrics
        self._meter = meter
        self._isolates_tenants = isolates_tenants
        self._server = server
        self._sequences = sequences or ModelMeter()
        self._usage = usage

    def at(self, path: str) -> ASGIApp:
        """The ASGI application of one endpoint; behind the ingress middleware, it may stream."""
        return _AsgiEndpoint(self, path)

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        request = EngineRequest.of(path, state["body"], _content_type(path, scope))
        request.check_sequences(self._server.max_sequences)
        request.check_conversation(self._server.media_hosts)
        key: ApiKey | None = state.get("api_key")
        if key is not None:
            request.check_priority(key.first_priority)
        route = self._routes.choose(request.fields, key)
        if (logged := state.get("logged")) is not None:
            logged.model = route.name
        if (trace := state.get("trace")) is not None:
            _tell(trace, route, request, key)
        request = request.for_model(route.asked)
        request.check_texts(route.max_model_len)
        sequences = request.sequences
        most = route.model.max_concurrent_requests
        self._sequences.check(route.name, most, sequences)
        if sequences > 1 and "take_more" in state:
            state["take_more"](sequences - 1)
        answer = _WatchedAnswer(send)
        if key is not None and request.costs_tokens:
            self._meter.check(key)
            answer.headers = self._meter.headers(key)
        started, usage = time.monotonic(), RequestUsage()
        self._sequences.count(route.name, most, sequences)
        try:
            await self._forward(route, request, state, receive, answer, usage)
        except RequestError as error:
            answer.status = error.status
            raise
        finally:
            self._sequences.count(route.name, most, -sequences)
            if key is not None and answer.is_charged:
                self._meter.charge(key, *usage.spent)
            if self._usage is not None:
                self._usage.charge(key, route.name, usage)
            took_s = time.monotonic() - started
            self._metrics.finished(route.name, path, answer.status, took_s, state.get("slo_ms"))
            if route.adapter is not None:
                self._metrics.adapters.finished(route.name, route.adapter, answer.status)

    async def _forward(
        self,
        route: ModelRoute,
        request: EngineRequest,
        state: Mapping[str, Any],
        receive: Receive,
        answer: _WatchedAnswer,
        usage: RequestUsage,
    ) -> None:
        key: ApiKey | None = state.get("api_key")
        slo_ms: float | None = state.get("slo_ms")
        deadline = predicted = expected = None
        if request.takes_hints:
            deadline = time.monotonic() + slo_ms / 1000 if slo_ms is not None else None
            # A predictor knows the model's own answers.
            if route.adapter is None:
                predicted = await self._lengths.predict(route.name, request.fields)
            expected = predicted.expected if predicted else None
        if key is not None and self._isolates_tenants:
            request = request.isolated(key.name)
        forwarded = ForwardRequest(
            model=route.name,
            content=request.with_hints(deadline=deadline, expected=expected),
            request_id=state["request_id"],
            expected_tokens=expected.tokens if expected else None,
            median_tokens=predicted.median if predicted else None,
            refuse_after=deadline if key is not None and key.refuse_late else None,
            usage=usage,
            trace=state.get("trace"),
        )
        await self._answering.forward(forwarded, receive, answer.send)
        if predicted and answer.is_whole and (tokens := usage.own_length):
            self._lengths.ended(route.name, predicted, tokens, key.name if key else "")


def _tell(
    trace: RequestTrace, route: ModelRoute, request: EngineRequest, key: ApiKey | None
) -> None:
    told: dict[str, str | bool] = {
        "gen_ai.request.model": str(request.fields.get("model", route.asked)),
        "loomserve.model": route.name,
        "loomserve.stream": request.streams,
    }
    if key is not None:
        told["loomserve.key"] = key.name
    trace.tell(told)


def _content_type(path: str, scope: Scope) -> bytes:
    """Of a form, which says there how it is to be read."""
    if not ENDPOINTS[path].is_form:
        return b""
    return next((value for name, value in scope["headers"] if name == b"content-type"), b"")


class _WatchedAnswer:
    """A client's ``send`` that keeps how the answer begins and whether it has ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = _CLIENT_CLOSED_REQUEST
        self.headers: list[tuple[bytes, bytes]] = []
        """The client gets them, too."""
        self._began = False
        self._complete = False

    @property
    def is_whole(self) -> bool:
        return self._began and self._complete

    @property
    def is_charged(self) -> bool:
        """Whether the client has got an answer, or a part, or has not waited for any."""
        return self._began or self.status == _CLIENT_CLOSED_REQUEST

    def send(self, message: Message) -> Awaitable[None]:
        """Each chunk of a stream passes it, so it is no coroutine of its own."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._began = self.status < 400
            if self.headers:
                message = {**message, "headers": [*message["headers"], *self.headers]}
        else:
            self._complete = not message.get("more_body", False)
        return self._send(message)


class _AsgiEndpoint:
    # Starlette takes an object that is no function for an ASGI application.
    def __init__(self, endpoint: ClientEndpoint, path: str) -> None:
        self._endpoint, self._path = endpoint, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint.answer(self._path, scope, receive, send)
