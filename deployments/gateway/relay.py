"""Relays one request to one replica, and the bytes of its answer: the path every token takes.

Nothing is parsed on the way back but the status and the ends of events; an error body is rewritten
into OpenAI's shape.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
from starlette.types import Send

from loomserve.platform.base.errors import EngineGone, Unavailable
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
from loomserve.platform.http.engine_errors import (
    MOST_WORDS,
    PASSED_BACK,
    engine_failed,
    engine_stalled,
    send_error,
)
from loomserve.platform.http.stall_watch import StallWatch, StandstillError
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.requests.whole_events import WholeEvents
from loomserve.platform.run.sockets import LocalConnector

_log = logging.getLogger("ray.serve")

# A replica that Serve still lists but that refuses connections is dead or restarting.
_CONNECT_TIMEOUT_S = 2.0
_KEPT_S = 60.0

_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError)


class NotTakenError(Exception):
    """The replica has not taken the request: no engine has seen it."""


class EngineEndedWithItError(Exception):
    """The engine ended, or cut the connection, while it had the request.

    ``begun``: part of the answer has been sent on.
    """

    def __init__(self, *, begun: bool = False) -> None:
        super().__init__("the engine ended while it had the request")
        self.begun = begun


class _BrokenIdleError(Exception):
    """A kept connection broke when it was used again; nothing tells whether the request arrived."""


@dataclass(frozen=True)
class Destination:
    """A replica of a model, and where its engine's server listens."""

    model: str
    replica_id: str
    address: str


class Relay:
    """Client of all engines over kept connections."""

    def __init__(
        self, internal_token: str, metrics: GatewayMetrics, *, idle_timeout_s: float
    ) -> None:
        """``idle_timeout_s``: an answer that has begun ends after so long without a byte."""
        self._internal_token = internal_token
        self._metrics = metrics
        self._idle_timeout_s = idle_timeout_s
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_note_reuse)
        self.session = aiohttp.ClientSession(
            connector=LocalConnector(keepalive_timeout=_KEPT_S),
            trace_configs=[reuse],
            **_session_options(),
        )

    async def close(self) -> None:
        await self.session.close()

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        """The body of an engine's answer to a GET request.

        Raises:
            aiohttp.ClientError: the engine cannot be reached.
            TimeoutError: it has not answered in time.
        """
        async with self.session.get(
            f"http://{address}{path}",
            headers={INTERNAL_TOKEN_HEADER: self._internal_token},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return await response.text()

    async def answer(
        self, to: Destination, request: EngineRequest, request_id: str, send: Send
    ) -> None:
        """Have the request answered.

        Raises:
            NotTakenError: another replica may answer it.
            EngineEndedWithItError: another replica's engine may end likewise.
            InternalError: the engine failed on it, and lives on.
            EngineGone: the answer stood still.
        """
        with self._metrics.in_flight(to.model, to.replica_id):
            try:
                await self._ask(self.session, to, request, request_id, send)
            except _BrokenIdleError:
                await self._ask_anew(to, request, request_id, send)

    async def _ask_anew(
        self, to: Destination, request: EngineRequest, request_id: str, send: Send
    ) -> None:
        """Ask a replica again over a connection of its own.

        Its server closes kept connections too, which is no engine's end; but a replica that is
        gone now has ended with the request.
        """
        async with aiohttp.ClientSession(
            connector=LocalConnector(force_close=True), **_session_options()
        ) as session:
            try:
                await self._ask(session, to, request, request_id, send)
            except NotTakenError:
                raise EngineEndedWithItError from None

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        to: Destination,
        request: EngineRequest,
        request_id: str,
        send: Send,
    ) -> None:
        connection = SimpleNamespace(reused=False)
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            INTERNAL_TOKEN_HEADER: self._internal_token,
        }
        started = time.monotonic()
        try:
            response = await session.post(
                f"http://{to.address}{request.engine_path}",
                data=request.encoded,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=connection,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise NotTakenError from None
        except _BROKEN:
            raise (_BrokenIdleError if connection.reused else EngineEndedWithItError) from None
        async with response:
            if response.status >= 400:
                await send_error(await _refusal(response, to, request_id), response.status, send)
            else:
                await self._relay_body(to.model, response, started, send)

    async def _relay_body(
        self, model: str, response: aiohttp.ClientResponse, started: float, send: Send
    ) -> None:
        headers = [(k, v) for k, v in response.raw_headers if k.lower() in PASSED_BACK]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        chunks, first = 0, 0.0
        events = WholeEvents() if response.content_type == "text/event-stream" else None
        body = response.content
        watch = StallWatch(body, self._idle_timeout_s)
        try:
            while True:
                try:
                    chunk = await body.readany()
                except _BROKEN:
                    raise EngineEndedWithItError(begun=True) from None
                if not chunk:
                    break
                if not chunks:
                    first = time.monotonic()
                    watch.start()
                chunks += 1
                watch.taken += len(chunk)
                if events is not None:
                    chunk = events.whole(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except StandstillError:
            raise engine_stalled(model, self._idle_timeout_s) from None
        finally:
            watch.stop()
        rest = events.rest if events is not None else b""
        await send({"type": "http.response.body", "body": rest, "more_body": False})
        if events is not None:
            self._metrics.streamed(
                model, ttft_s=first - started, stream_s=time.monotonic() - first, chunks=chunks
            )


def _session_options() -> dict[str, Any]:
    return {
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        "auto_decompress": False,
        "read_bufsize": 2**18,
    }


async def _note_reuse(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _refusal(response: aiohttp.ClientResponse, to: Destination, request_id: str) -> bytes:
    """The body of an engine's answer of 400 to 499; raises what any higher one means."""
    if response.status == EngineGone.status:
        raise EngineEndedWithItError
    if response.status == Unavailable.status:
        raise NotTakenError
    try:
        if response.status < 500:
            return await response.read()
        words = await response.content.read(MOST_WORDS)
    except _BROKEN:
        raise EngineEndedWithItError from None
    text = words.decode("utf-8", "replace")
    _log.error("replica %s failed on request %s: %s", to.replica_id, request_id, text)
    raise engine_failed(to.model, request_id)
