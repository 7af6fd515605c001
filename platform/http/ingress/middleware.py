"""The ingress middleware: one ASGI application around the platform's."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.access.request_meter import RequestMeter
from loomserve.platform.base.errors import BadRequest, NothingThere, RequestTimeout, UnexpectedBody
from loomserve.platform.base.request_logs import LoggedRequest, logged_request
from loomserve.platform.config import Server
from loomserve.platform.http.ingress.audit import Audit
from loomserve.platform.http.ingress.authentication import Authentication, under
from loomserve.platform.http.ingress.body import (
    METHODS_WITH_BODY,
    BodyBudget,
    check_encoding,
    has_body,
    read_body,
    replay,
    without_bom,
)
from loomserve.platform.http.ingress.exchange import Exchange, IngressTraces, choose_request_id
from loomserve.platform.http.ingress.messages import MessagesExchange
from loomserve.platform.http.ingress.paths import Directions, check_segments, in_one_way
from loomserve.platform.http.ingress.responses import as_request_error, error_response
from loomserve.platform.requests.endpoints import is_for_clients
from loomserve.platform.requests.policy.fields import is_of_messages

_log = logging.getLogger("loomserve.ingress")
FOR_CLIENTS = "loomserve.for_clients"
"""Key of a scope whose request came by a port where there is nothing for operators."""
_EXCHANGE = "loomserve.exchange"
_NUMBER = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,12})?")
_MAX_MS = 86_400_000.0


def ingress_middleware(
    app: ASGIApp,
    server: Server,
    *,
    rejected: Callable[[str], None],
    streamed: frozenset[str] = frozenset(),
    audit: Callable[[str], None] | None = None,
    keys: LiveKeys | None = None,
    requests: RequestMeter | None = None,
    traces: IngressTraces | None = None,
    endpoints: Collection[str] = (),
) -> ASGIApp:
    """Wrap ``app`` in request ids, CORS, error answers, authentication and limits.

    Starlette and FastAPI apps need ``exception_handlers``. ``rejected`` gets the code of each error
    that a client is answered. Bodies posted to ``streamed`` paths are read by the app, and their
    ``body`` is None. ``audit`` gets a line for each change by the admin API. ``keys`` are kept up
    to date by the caller; None: those of ``server``. ``endpoints`` are hinted at where there is
    nothing.
    """
    authentication = Authentication(server, keys or LiveKeys(server))
    meter = requests or RequestMeter()
    directions = Directions(endpoints)
    inner: ASGIApp = _Guard(app, server, authentication, rejected, streamed, meter, directions)
    if audit is not None:
        inner = Audit(inner, audit, authentication.is_operator)
    if server.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=server.cors_origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", *(("traceresponse",) if traces else ())),
        )

    logs = server.log_format == "json"

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            # No API of the platform speaks it, so a handshake must not slip past the keys.
            await send({"type": "websocket.close", "code": 1008})
        else:
            scope, exchange = _named(scope, send)
            if traces is None and not logs:
                await inner(scope, receive, exchange.send)
            else:
                with _observed(scope, exchange, traces, logs=logs):
                    await inner(scope, receive, exchange.send)

    return named


@contextmanager
def _observed(
    scope: Scope, exchange: Exchange, traces: IngressTraces | None, *, logs: bool
) -> Iterator[None]:
    """Record the outcome in the trace, and the request id in lines of the log."""
    state = scope["state"]
    trace = traces.begin(scope) if traces is not None else None
    exchange.trace = state["trace"] = trace
    if logs:
        trace_id = trace.id if trace is not None else None
        state["logged"] = logged = LoggedRequest(state["request_id"], trace_id=trace_id)
        token = logged_request.set(logged)
    try:
        yield
    finally:
        if logs:
            logged_request.reset(token)
        if trace is not None:
            if not exchange.complete:
                trace.tell({"loomserve.complete": False})
            trace.end(exchange.status)


def _named(scope: Scope, send: Send) -> tuple[Scope, Exchange]:
    headers: list[tuple[bytes, bytes]] = []
    given = None
    for pair in scope["headers"]:
        if pair[0] == b"x-request-id":
            given = pair[1]
        else:
            headers.append(pair)
    request_id = choose_request_id(given)
    headers.append((b"x-request-id", request_id))
    scope = {**scope, **in_one_way(scope)}
    kind = MessagesExchange if is_of_messages(scope["path"]) else Exchange
    exchange = kind(send, request_id)
    state = {**scope.get("state", {}), "request_id": request_id.decode()}
    own = {"headers": headers, "state": state, _EXCHANGE: exchange}
    return {**scope, **own}, exchange


def _as_json(scope: Scope) -> Scope:
    """The request as the admin API reads it: all bodies are JSON, whatever their type says."""
    if not under(scope["path"], "/admin"):
        return scope
    others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


@dataclass(eq=False)
class _Guard:
    """Middleware within CORS, so that browsers may read its errors too."""

    app: ASGIApp
    server: Server
    authentication: Authentication
    rejected: Callable[[str], None]
    streamed: frozenset[str]
    requests: RequestMeter
    directions: Directions

    def __post_init__(self) -> None:
        # Who may have a body of any size, may have one at least.
        share = max(self.server.max_body, self.server.max_body_total // self.server.front_ends)
        self._bodies = BodyBudget(share)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.timeout(self.server.request_timeout_s)
        try:
            async with deadline:
                await self._admit(scope, receive, send)
        except Exception as error:
            cause = self._too_late() if deadline.expired() else error
            await self._answer(cause, scope, receive, send)

    def _too_late(self) -> RequestTimeout:
        return RequestTimeout(
            f"The request was not done after {self.server.request_timeout_s:g} s. Ask for fewer "
            "tokens, or ask the operator to raise server.request_timeout_s."
        )

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_segments(scope["path"])
        headers = dict(scope["headers"])
        for_clients = FOR_CLIENTS in scope
        key = self.authentication.check(scope["path"], headers, for_clients=for_clients)
        state = scope["state"]
        state["api_key"] = key
        state["slo_ms"] = parse_slo_ms(headers.get(b"x-slo-ms"))
        if key is None or not is_for_clients(scope["path"]):
            await self._run(headers, scope, receive, send)
            return
        self.requests.acquire(key)
        sequences = 1

        def take_more(more: int) -> None:
            nonlocal sequences
            self.requests.acquire_more(key, more)
            sequences += more

        state["take_more"] = take_more
        try:
            await self._run(headers, scope, receive, send)
        finally:
            self.requests.release(key, sequences)

    async def _run(
        self, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        state = scope["state"]
        if scope["method"] not in METHODS_WITH_BODY:
            if has_body(headers):
                raise UnexpectedBody(
                    f"A {scope['method']} request has no body here. Send it without one."
                )
            state["body"] = b""
            await self.app(scope, receive, send)
            return
        check_encoding(headers.get(b"content-encoding"))
        if scope["method"] == "POST" and scope["path"] in self.streamed:
            state["body"] = None
            await self.app(scope, receive, send)
        else:
            # The body is kept until the answer has ended, for another engine may have to get it.
            with self._bodies.counted(receive) as counted:
                state["body"] = body = await read_body(
                    counted,
                    headers.get(b"content-length"),
                    max_bytes=self.server.max_body,
                    timeout_s=self.server.header_timeout_s,
                )
                if body is not None:
                    state["body"] = body = without_bom(body)
                    await self.app(_as_json(scope), replay(body, receive), send)

    async def _answer(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[_EXCHANGE]
        answered = as_request_error(error)
        if isinstance(answered, NothingThere):
            answered = self.directions.given(answered, scope["path"])
        elif answered is not error:
            _log.error("request %s failed", exchange.request_id.decode(), exc_info=error)
        if exchange.complete and exchange.status is not None and exchange.status < 400:
            return
        self.rejected(answered.code)
        if exchange.trace is not None:
            exchange.trace.failed(answered.code)
        if exchange.status is None:
            await error_response(answered)(scope, receive, send)
        elif exchange.complete:
            return
        elif exchange.is_event_stream:
            event = exchange.error_event(answered.body(), answered.status)
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            # Only a broken connection tells the client that a plain body is not whole.
            raise error


def parse_slo_ms(header: bytes | None) -> float | None:
    """Milliseconds, more than zero and at most a day; None without header. Raises BadRequest."""
    if header is None:
        return None
    if _NUMBER.fullmatch(header) and 0 < (slo_ms := float(header)) <= _MAX_MS:
        return slo_ms
    raise BadRequest(
        f"The x-slo-ms header must be a number of milliseconds, more than 0 and at most "
        f"{_MAX_MS:.0f}.",
        param="x-slo-ms",
    )
