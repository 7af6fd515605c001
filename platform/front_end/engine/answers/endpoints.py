"""vLLM's endpoints of chats, completions and responses, without what FastAPI does for each."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from loomserve.platform.front_end.engine.answers.late_logprobs import (
    LateLogprobs,
    late_logprobs,
    written,
)
from loomserve.platform.front_end.engine.input_errors import refused_late
from loomserve.platform.http.asgi import ON_LEFT
from loomserve.platform.requests.endpoints import AT_ENGINE

_METHODS = {
    "openai_serving_chat": "create_chat_completion",
    "openai_serving_completion": "create_completion",
    "openai_serving_responses": (_RESPONSES := "create_responses"),
}
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(frozen=True)
class DirectEndpoint:
    """ASGI application of one of vLLM's routes."""

    theirs: ASGIApp
    """FastAPI's, which answers requests that do not say what is done when nobody waits for them."""
    reader: Any
    """Reads a request out of JSON."""
    serving: Any
    method: str
    keep_alive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if ON_LEFT not in scope or task is None:
            await self.theirs(scope, receive, send)
            return
        scope[ON_LEFT].append(task.cancel)
        raw = Request(scope, receive, send)
        request = self.reader.validate_python(json.loads(await raw.body()))
        late = None if request.stream else LateLogprobs(getattr(request, "n", None) or 1)
        token = late_logprobs.set(late)
        try:
            answer = await getattr(self.serving, self.method)(request, raw)
        except ValidationError as error:
            raise await refused_late(raw, error) from None
        finally:
            late_logprobs.reset(token)
        if isinstance(answer, BaseModel):
            status = answer.error.code if isinstance(answer, ErrorResponse) else 200
            body = await written(answer, late)
            headers = [(b"content-length", str(len(body)).encode()), _JSON]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
        if self.method == _RESPONSES:
            answer = _convert_stream_to_sse_events(answer)
        async with aclosing(with_sse_keep_alive(answer, self.keep_alive_s)) as chunks:
            async for chunk in chunks:
                piece = {"body": chunk.encode(), "more_body": True}
                await send({"type": "http.response.body", **piece})
        await send({"type": "http.response.body", "body": b""})


def answer_directly(app: Any) -> None:
    """Have vLLM's app, with its state complete, answer by these endpoints, found first."""
    keep_alive_s = float(getattr(app.state.args, "sse_keep_alive_interval", 0))
    routes = app.router.routes
    for route in [each for each in routes if isinstance(each, APIRoute)]:
        row = AT_ENGINE.get(route.path)
        serving = getattr(app.state, row.handler, None) if row is not None else None
        if row is None or serving is None or row.handler not in _METHODS:
            continue
        (field,) = route.dependant.body_params
        method = _METHODS[row.handler]
        route.app = DirectEndpoint(route.app, field._type_adapter, serving, method, keep_alive_s)
        routes.remove(route)
        routes.insert(0, route)
