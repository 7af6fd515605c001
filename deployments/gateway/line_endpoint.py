"""Where the batch lane has a line computed: the way of a request from a gateway on.

A line differs from a client's own request in whose name it comes, which the lane says, and in what
bounds it: no limit that spreads clients' requests, and a time without a token that leaves room for
online requests to go first.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import KW_ONLY, dataclass, field, replace

from loomserve.deployments.gateway.dispatch import Dispatching, ModelRequest
from loomserve.deployments.gateway.routes import ModelRoutes
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.token_meter import TokenMeter
from loomserve.platform.base.errors import (
    BadRequest,
    BodyTooLarge,
    InternalError,
    RequestError,
    Unavailable,
)
from loomserve.platform.base.request_logs import LoggedRequest, logged_request
from loomserve.platform.base.sqlite import LatestGeneration
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import LineRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.tracing import RequestTrace, RequestTracer
from loomserve.platform.usage.meter import UsageMeter

# Of embeddings and of what a pooler gives.
_BYTES = ("bytes", "bytes_only")


@dataclass(eq=False)
class LineEndpoint:
    """Answers the lines of batches, each with a status and a body, also where it refuses one."""

    server: Server
    keys: LiveKeys
    meter: TokenMeter
    routes: ModelRoutes
    dispatcher: Dispatching
    _: KW_ONLY
    isolates_tenants: bool
    """No API key reads another's KV blocks."""
    usage: UsageMeter | None = None
    tracer: RequestTracer | None = None
    _lanes: LatestGeneration = field(default_factory=LatestGeneration, init=False)

    async def complete(self, line: LineRequest) -> tuple[int, bytes]:
        trace = self._begin(line)
        if self.server.log_format == "json":
            model = line.model or line.body.get("model")
            trace_id = trace.id if trace is not None else None
            # Of this call alone, which is a task of its own.
            logged_request.set(LoggedRequest(line.request_id, model, trace_id))
        if trace is None:
            return await self._complete(line, None)
        status: int | None = None
        try:
            status, body = await self._complete(line, trace)
        finally:
            trace.end(status)
        return status, body

    def _begin(self, line: LineRequest) -> RequestTrace | None:
        if self.tracer is None:
            return None
        told = {"loomserve.request_id": line.request_id, "http.route": line.path}
        return self.tracer.begin("batch line", {**told, "loomserve.key": line.owner})

    async def _complete(self, line: LineRequest, trace: RequestTrace | None) -> tuple[int, bytes]:
        try:
            self._lanes.check(line.generation)
            key = self.keys.named(line.owner)
            request = self._request(line, key)
            if trace is not None:
                request = replace(request, trace=trace)
                trace.tell({"loomserve.model": request.model})
            status, body = await self._answer(key, request, line.timeout_s)
        except RequestError as error:
            return _refused(error)
        except TimeoutError:
            return _refused(_given_up(request, line.timeout_s))

        if key is not None and status < 400:
            self.meter.charge(key, *request.usage.spent)
        return status, body

    async def _answer(
        self, key: ApiKey | None, request: ModelRequest, timeout_s: float
    ) -> tuple[int, bytes]:
        work = asyncio.ensure_future(self.dispatcher.collect(request))
        try:
            seen = -1
            # One that gets tokens is computed, however slowly.
            while not work.done() and seen != request.usage.outputs:
                seen = request.usage.outputs
                await asyncio.wait((work,), timeout=timeout_s)
            if not work.done():
                raise TimeoutError
            return work.result()
        finally:
            work.cancel()
            await asyncio.wait((work,))
            if self.usage is not None:
                self.usage.charge(key, request.model, request.usage)

    def _request(self, line: LineRequest, key: ApiKey | None) -> ModelRequest:
        request = EngineRequest.of_fields(line.path, line.body)
        request.check_conversation(self.server.media_hosts)
        if line.body.get("stream"):
            raise BadRequest("a batch's requests cannot stream; leave it out", param="stream")
        if line.body.get("encoding_format") in _BYTES:
            raise BadRequest(
                "a batch's answers are JSON; ask for base64 in the place of bytes",
                param="encoding_format",
            )
        request.check_sequences(self.server.max_sequences)
        if key is not None:
            request.check_priority(key.first_priority)
        route = self.routes.choose(line.body, key, line.model)
        request = request.for_model(route.asked)
        request.check_texts(route.max_model_len)
        if key is not None and self.isolates_tenants:
            request = request.isolated(key.name)
        request = request.with_hints(background=True)
        if request.size > self.server.max_body:
            raise BodyTooLarge(
                f"The request is larger than {self.server.max_body} bytes. Send less, or ask the "
                "operator to raise server.max_body."
            )
        return ModelRequest(
            model=route.name,
            content=request,
            request_id=line.request_id,
            # The lane has looked for room there.
            pinned_to=line.engine if line.model in (None, route.asked) else None,
            # The lane tests suspects one by one, each alone on an engine.
            carried_on=False,
        )


def _given_up(request: ModelRequest, timeout_s: float) -> RequestError:
    if not request.usage.outputs:
        return Unavailable(
            f"No engine had begun the line after {timeout_s:g} s, for which it has others.",
            reason="line_not_begun",
        )
    return InternalError(
        f"The engine gave the line no token for {timeout_s:g} s. Send it again, or ask the "
        "operator to raise batch.line_timeout_s.",
        reason="line_timeout",
    )


def _refused(error: RequestError) -> tuple[int, bytes]:
    return error.status, json.dumps(error.body()).encode()
