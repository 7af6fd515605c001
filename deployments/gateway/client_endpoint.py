"""The endpoints that clients ask: one request in, an engine's answer out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from loomserve.deployments.gateway.dispatch import Dispatching, ModelRequest
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.access.request_meter import ModelMeter
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


@dataclass(eq=False)
class ClientEndpoint:
    """ASGI application, behind the ingress middleware, of all of vLLM's endpoints for clients. It
    keeps requests within each model's limit."""

    server: Server
    routes: ModelRoutes
    dispatcher: Dispatching
    lengths: LengthPredictions
    metrics: GatewayMetrics
    meter: TokenMeter
    _: KW_ONLY
    isolates_tenants: bool
    """No API key reads another's KV blocks."""
    sequences: ModelMeter = field(default_factory=ModelMeter)
    """Counts those of each model."""
    usage: UsageMeter | None = None
    """Keeps what API keys use; None: nobody does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, state = scope["path"], scope["state"]
        request = EngineRequest.of(path, state["body"], _content_type(path, scope))
        request.check_sequences(self.server.max_sequences)
        request.check_conversation(self.server.media_hosts)
        key: ApiKey | None = state.get("api_key")
        if key is not None:
            request.check_priority(key.first_priority)
        route = self.routes.choose(request.fields, key)
        if (logged := state.get("logged")) is not None:
            logged.model = route.name
        if (trace := state.get("trace")) is not None:
            _tell(trace, route, request, key)
        request = request.for_model(route.asked)
        request.check_texts(route.max_model_len)
        sequences = request.sequences
        most = route.model.max_concurrent_requests
        self.sequences.check(route.name, most, sequences)
        if sequences > 1 and "take_more" in state:
            state["take_more"](sequences - 1)
        answer = _WatchedAnswer(send)
        if key is not None and request.endpoint.computes:
            self.meter.check(key)
            answer.headers = self.meter.headers(key)
        started, usage = time.monotonic(), RequestUsage()
        self.sequences.count(route.name, most, sequences)
        try:
            await self._dispatch(route, request, state, receive, answer, usage)
        except RequestError as error:
            answer.status = error.status
            raise
        finally:
            self.sequences.count(route.name, most, -sequences)
            if key is not None and answer.is_charged:
                self.meter.charge(key, *usage.spent)
            if self.usage is not None:
                self.usage.charge(key, route.name, usage)
            took_s = time.monotonic() - started
            self.metrics.finished(route.name, path, answer.status, took_s, state.get("slo_ms"))
            if route.adapter is not None:
                self.metrics.adapters.finished(route.name, route.adapter, answer.status)

    async def _dispatch(
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
        if request.endpoint.hints:
            deadline = time.monotonic() + slo_ms / 1000 if slo_ms is not None else None
            # A predictor knows the model's own answers.
            if route.adapter is None:
                predicted = await self.lengths.predict(route.name, request.fields)
            expected = predicted.expected if predicted else None
        if key is not None and self.isolates_tenants:
            request = request.isolated(key.name)
        dispatched = ModelRequest(
            model=route.name,
            content=request.with_hints(deadline=deadline, expected=expected),
            request_id=state["request_id"],
            expected_tokens=expected.tokens if expected else None,
            median_tokens=predicted.median if predicted else None,
            refuse_after=deadline if key is not None and key.refuse_late else None,
            usage=usage,
            trace=state.get("trace"),
        )
        await self.dispatcher.dispatch(dispatched, receive, answer.send)
        if predicted and answer.is_whole and (tokens := usage.own_length):
            self.lengths.ended(route.name, predicted, tokens, key.name if key else "")


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
