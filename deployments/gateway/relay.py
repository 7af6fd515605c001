"""Relays a front end's answer to the client: successes as they are, errors in OpenAI's shape.

The front end is an ASGI application in the gateway's own process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loomserve.deployments.gateway.replica_choice import AnswerContext
from loomserve.platform.base.errors import RequestError
from loomserve.platform.front_end.routing import routing_context
from loomserve.platform.http.asgi import ON_LEFT, ClientGoneError, disconnected, own_post
from loomserve.platform.http.engine_errors import (
    MOST_ERROR_BYTES,
    MOST_WORDS,
    PASSED_BACK,
    engine_failed,
    engine_stalled,
    send_error,
)
from loomserve.platform.requests.metrics import GatewayMetrics

_log = logging.getLogger("ray.serve")

_EVENTS = b"text/event-stream"
# How long vLLM may take to give up a request that nobody waits for.
_ABORT_TIMEOUT_S = 2.0
# Within the limit; an answer that stands still ends one check's share of it late at most.
_CHECKS = 8


async def relay(
    app: ASGIApp,
    context: AnswerContext,
    receive: Receive,
    send: Send,
    metrics: GatewayMetrics,
    *,
    idle_timeout_s: float,
) -> None:
    """Have a front end, ``app``, answer the request.

    An answer of which an engine has given something ends after ``idle_timeout_s`` without more, if
    nothing waits there. Raises ClientGoneError if the client has gone, and the request is aborted;
    the RequestError that the front end has ended it with; InternalError if the front end or an
    engine failed on it; EngineGone if the answer stood still.
    """
    request = context.request
    passed = _RelayedAnswer(send, context)
    token = routing_context.set(context)
    try:
        async with asyncio.timeout(None) as limit:
            passed.watch = _Watch(limit, idle_timeout_s, context)
            await _run(app, context, passed, receive)
    except TimeoutError:
        if not limit.expired():
            raise
        raise engine_stalled(request.model, idle_timeout_s) from None
    except (ClientGoneError, RequestError):
        raise
    except Exception as error:
        # vLLM's server answers first, and then tells its own log.
        if context.failure is None and passed.error_status is None:
            _log.error("request %s failed", request.request_id, exc_info=error)
            raise engine_failed(request.model, request.request_id) from None
    finally:
        # Else the two would keep each other until the next collection.
        context.on_chosen = None
        passed.watch.stop()
        routing_context.reset(token)
        context.goes_on()
    await passed.finish()
    passed.count(metrics)


async def _run(
    app: ASGIApp, context: AnswerContext, passed: _RelayedAnswer, receive: Receive
) -> None:
    """Run the application until it is done, the client is gone, or this is cancelled."""
    body = _Body(context.request.content.pieces())
    scope = _scope(context)
    work = asyncio.ensure_future(app(scope, body.receive, passed.send))
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        work.result()
    finally:
        gone.cancel()
        if not work.done():
            # vLLM has tasks of its own for a request, which its cancellation would not reach.
            passed.muted = True
            body.left.set()
            for leave in scope[ON_LEFT]:
                leave()
            await asyncio.wait((work,), timeout=_ABORT_TIMEOUT_S)
            work.cancel()


class _Body:
    """A ``receive`` of a request that has come."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.left = asyncio.Event()
        """Nobody waits for the answer."""
        self._pieces = pieces
        self._next = next(pieces, None)

    async def receive(self) -> Message:
        if self._next is None:
            await self.left.wait()
            return {"type": "http.disconnect"}
        piece, self._next = self._next, next(self._pieces, None)
        return {"type": "http.request", "body": piece, "more_body": self._next is not None}


class _Watch:
    """Ends an answer that stands still, by a few checks within its limit.

    A chunk costs an addition to ``taken``, no more. An engine's outputs count, too, since not all
    become pieces, as of a tool's arguments. There is no standstill before the first output (the
    Responses API begins its stream before), nor while the engine takes no step, which is its own
    affair, or since the answer went on there.
    """

    def __init__(self, limit: asyncio.Timeout, limit_s: float, context: AnswerContext) -> None:
        self.taken = 0
        """Pieces that have been passed on."""
        self.sending = False
        """Whether the client is behind, which is no standstill of the engine."""
        self._limit, self._limit_s = limit, limit_s
        self._context = context
        self._seen = 0
        self._steps: list[int | None] = []
        self._still_for = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / _CHECKS, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        come = self.taken + self._context.usage.outputs
        steps = [each() for each in self._context.engines.values()]
        stepped = steps != self._steps or not steps
        still = come == self._seen and stepped and None not in steps and not self._excused
        self._still_for = self._still_for + 1 if still else 0
        self._seen, self._steps = come, steps
        if self._still_for == _CHECKS:
            self._limit.reschedule(asyncio.get_running_loop().time())
        else:
            self.start()

    @property
    def _excused(self) -> bool:
        begun = self._context.usage.outputs > 0
        return self.sending or not begun or self._context.may_wait


class _RelayedAnswer:
    """A ``send`` of the front end's that passes successes on and keeps errors.

    vLLM begins a stream before it has its first output. Its head is held until a replica has been
    chosen, so that a request which none takes is told so by the status of its answer.
    """

    watch: _Watch

    def __init__(self, send: Send, context: AnswerContext) -> None:
        self.error_status: int | None = None
        """Of an answer that is an error."""
        self.muted = False
        self._send = send
        self._context = context
        self._error = bytearray()
        self._head: Message | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        self._first = 0.0
        self._chunks = 0
        self._streams = False
        self._complete = False

    async def send(self, message: Message) -> None:
        if self.muted or self._context.failure is not None:
            return  # finish() raises a failure, in the place of what vLLM makes of it
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        if self.error_status is not None:
            # Its client gets a part, and no message needs more.
            room = MOST_ERROR_BYTES - len(self._error)
            self._error += message.get("body", b"")[:room]
            return
        if self._head is not None:
            await self._begin()
        # Each chunk of a stream comes here, and pays for each coroutine on its way.
        if message.get("body"):
            if not self.watch.taken:
                self.watch.start()
            self.watch.taken += 1
            if self._context.usage.outputs:
                if not self._chunks:
                    self._note_first()
                self._chunks += 1
        self._complete = not message.get("more_body", False)
        self.watch.sending = True
        await self._send(message)
        self.watch.sending = False

    def _note_first(self) -> None:
        self._first = time.monotonic()
        if self._streams and self._context.trace is not None:
            self._context.trace.event("first_token")

    async def _start(self, message: Message) -> None:
        if message["status"] >= 400:
            self.error_status = message["status"]
            return
        headers = [(k, v) for k, v in message["headers"] if k.lower() in PASSED_BACK]
        self._streams = any(v.startswith(_EVENTS) for k, v in headers)
        self._head = {**message, "headers": headers}
        if self._streams and not self._context.chosen:
            self._context.on_chosen = self._begin_soon
        else:
            await self._begin()

    def _begin_soon(self) -> None:
        self._beginning = asyncio.ensure_future(self._begin())

    async def _begin(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self.muted and self._context.failure is None:
            await self._send(head)

    async def finish(self) -> None:
        """Send the error that was the answer, or raise what it means."""
        if self._context.failure is not None:
            raise self._context.failure
        request = self._context.request
        if self.error_status is None:
            if not self._complete:
                _log.error("the answer to request %s has no end", request.request_id)
                raise engine_failed(request.model, request.request_id)
            return
        if self.error_status >= 500:
            words = bytes(self._error[:MOST_WORDS]).decode("utf-8", "replace")
            _log.error("request %s failed: %s", request.request_id, words)
            raise engine_failed(request.model, request.request_id)
        fields = {*request.content.fields, *request.content.texts}
        await send_error(bytes(self._error), self.error_status, self._send, fields)

    def count(self, metrics: GatewayMetrics) -> None:
        if self._streams and self._chunks:
            metrics.streamed(
                self._context.request.model,
                ttft_s=self._first - self._started,
                stream_s=time.monotonic() - self._first,
                chunks=self._chunks,
            )


def _scope(context: AnswerContext) -> Scope:
    content, trace = context.request.content, context.request.trace
    scope = own_post(
        content.engine_path,
        content.content_type,
        (b"content-length", str(content.size).encode()),
        (b"x-request-id", context.request.request_id.encode()),
        *(trace.headers if trace is not None else ()),
    )
    return {**scope, ON_LEFT: []}
