"""Forwards a request to an engine and its bytes back: the path every token takes.

Nothing is parsed on the way back but the status; an error body is rewritten into OpenAI's shape.
A request that an engine has not begun to answer is tried on another replica; afterwards a failure
ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass

import aiohttp
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Send

from loomserve.platform.base.errors import EngineGone, TooManyRequests, Unavailable
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
from loomserve.platform.http.client_gone import ClientGoneError, while_connected
from loomserve.platform.http.engine_errors import normalise
from loomserve.platform.lengths.predict.request import longest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.routers.in_flight import InFlight
from loomserve.routers.lateness import finish
from loomserve.routers.ticket import RoutingTicket

# A replica that Serve still lists but that refuses connections is dead or restarting.
_CONNECT_TIMEOUT_S = 2.0
# How long a request waits for any replica before it is refused.
_ROUTE_TIMEOUT_S = 30.0
# A retry looks for another replica, as does whoever pinned the request; one that is only just
# starting is not worth the wait.
_REROUTE_TIMEOUT_S = 1.0
_MAX_ATTEMPTS = 3
_RETRY_AFTER_S = 5.0
# A rough bound for routing only; engines count exactly.
_BYTES_PER_TOKEN = 4
_ANSWER_TOKENS = 256

_PASSED_BACK = frozenset({b"content-type", b"content-length", b"cache-control"})


class ReplicaFailedError(Exception):
    """An engine failed before it began to answer; another may succeed."""

    def __init__(self, replica_id: str, message: str) -> None:
        super().__init__(message)
        self.replica_id = replica_id


@dataclass(frozen=True)
class ForwardRequest:
    """A request to an engine of ``model``, and what its routing depends on."""

    model: str
    content: EngineRequest
    request_id: str
    pinned_to: str | None = None
    """Id of the only replica that may take it; None: any may."""
    expected_tokens: float | None = None
    """Predicted length of the answer."""
    refuse_after: float | None = None
    """Unix time; a request that is predicted to end later is refused."""


class CollectedAnswer:
    """A ``send`` that keeps the whole answer, for a request of the platform's own."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


async def never_gone() -> Message:
    """A ``receive`` of a client that stays: who waits for the answer may cancel instead."""
    never: Message = await asyncio.get_running_loop().create_future()
    return never


class Forwarder:
    """Client of all engines: relays requests and answers over kept connections."""

    def __init__(self, internal_token: str, metrics: GatewayMetrics) -> None:
        self._internal_token = internal_token
        self._metrics = metrics
        self.ledger = InFlight()
        """The requests that this gateway has open on engines."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            read_bufsize=2**18,
        )

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

    async def close(self) -> None:
        await self.session.close()

    async def forward(
        self, request: ForwardRequest, handle: DeploymentHandle, receive: Receive, send: Send
    ) -> None:
        """Answer the request, or stop as soon as the client is gone.

        Raises:
            Unavailable: no replica took it in time.
            TooManyRequests: it is predicted to end after ``request.refuse_after``.
            EngineGone: engines failed before or while answering.
        """
        try:
            # Closing the connection to the engine is what makes vLLM abort the request.
            await while_connected(self._with_retries(request, handle, send), receive)
        except ClientGoneError:
            self._metrics.client_disconnected(request.model)

    async def collect(
        self, request: ForwardRequest, handle: DeploymentHandle, receive: Receive = never_gone
    ) -> tuple[int, bytes]:
        """The status and body of the answer to a request of the platform's own.

        Raises what :meth:`forward` raises.
        """
        answer = CollectedAnswer()
        await self.forward(request, handle, receive, answer.send)
        return answer.status, bytes(answer.body)

    async def _with_retries(
        self, request: ForwardRequest, handle: DeploymentHandle, send: Send
    ) -> None:
        excluded: frozenset[str] = frozenset()
        last_failure = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                with self._ticket(request, excluded) as ticket:
                    replica_id, address = await self._choose(request, handle, ticket)
                    if not excluded:
                        self._refuse_if_late(request, ticket)
                    await self._relay(request, replica_id, address, send)
                return
            except ReplicaFailedError as failure:
                self._metrics.engine_failed(request.model)
                excluded |= {failure.replica_id}
                last_failure = str(failure)
            except Unavailable:
                if not last_failure:
                    raise
                break  # that it failed says more than that there is no other
        raise Unavailable(
            f"no replica of model {request.model!r} could answer ({last_failure}); "
            "it is being restarted, try again shortly",
            reason="engine_gone",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _ticket(self, request: ForwardRequest, excluded: frozenset[str]) -> RoutingTicket:
        fields = request.content.fields
        return RoutingTicket(
            self.ledger,
            prompt=fields.get("messages") or fields.get("prompt") or "",
            prompt_tokens=len(request.content.encoded) // _BYTES_PER_TOKEN,
            output_tokens=_output_tokens(request),
            exclude=excluded,
            pinned_to=request.pinned_to,
        )

    async def _choose(
        self, request: ForwardRequest, handle: DeploymentHandle, ticket: RoutingTicket
    ) -> tuple[str, str]:
        """Id and address of the replica that the router has booked the request on."""
        no_wait = bool(ticket.exclude) or ticket.pinned_to is not None
        with self._metrics.queued(request.model):
            try:
                async with asyncio.timeout(_REROUTE_TIMEOUT_S if no_wait else _ROUTE_TIMEOUT_S):
                    async with handle.choose_replica(ticket, _reserve=False) as selection:
                        return selection.replica_id, selection.replica_metadata["address"]
            except (TimeoutError, DeploymentUnavailableError, RayServeException):
                raise Unavailable(
                    f"model {request.model!r} has no replica that takes requests now; "
                    "try again shortly",
                    reason="no_replica",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None

    def _refuse_if_late(self, request: ForwardRequest, ticket: RoutingTicket) -> None:
        replica, expected = ticket.replica, request.expected_tokens
        if request.refuse_after is None or expected is None or replica is None:
            return
        within_s = request.refuse_after - time.time()
        predicted = finish(replica, ticket.prompt_tokens, expected)
        if predicted is None or predicted.total_s <= within_s:
            return
        self._metrics.refused_late(request.model)
        raise TooManyRequests(
            f"model {request.model!r} is predicted to answer in {predicted.total_s:.1f} s, of "
            f"which it waits {predicted.wait_s:.1f} s, and x-slo-ms leaves {within_s:.1f} s; try "
            "again later, or allow more time",
            param="x-slo-ms",
            reason="deadline_unreachable",
            retry_after_s=predicted.wait_s,
        )

    async def _relay(
        self, request: ForwardRequest, replica_id: str, address: str, send: Send
    ) -> None:
        started = time.monotonic()
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request.request_id,
            INTERNAL_TOKEN_HEADER: self._internal_token,
        }
        begun = False
        with self._metrics.in_flight(request.model, replica_id):
            try:
                async with self.session.post(
                    f"http://{address}{request.content.engine_path}",
                    data=request.content.encoded,
                    headers=headers,
                ) as response:
                    if response.status >= 500:
                        raise ReplicaFailedError(replica_id, await _engine_says(response))
                    if response.status >= 400:
                        await _send_error(response, send)
                        return
                    begun = True
                    await self._relay_body(request, response, started, send)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                if begun:
                    self._metrics.engine_failed(request.model)
                    raise EngineGone(
                        f"the engine of model {request.model!r} ended while it answered; "
                        "send the request again"
                    ) from None
                raise ReplicaFailedError(replica_id, type(error).__name__) from None

    async def _relay_body(
        self,
        request: ForwardRequest,
        response: aiohttp.ClientResponse,
        started: float,
        send: Send,
    ) -> None:
        headers = [(k, v) for k, v in response.raw_headers if k.lower() in _PASSED_BACK]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        chunks, first = 0, 0.0
        async for chunk in response.content.iter_any():
            if not chunks:
                first = time.monotonic()
            chunks += 1
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if response.content_type == "text/event-stream":
            self._metrics.streamed(
                request.model, ttft_s=first - started, stream_s=time.monotonic() - first,
                chunks=chunks,
            )  # fmt: skip


def _output_tokens(request: ForwardRequest) -> int:
    if request.expected_tokens is not None:
        return math.ceil(request.expected_tokens)
    return longest(request.content.fields) or _ANSWER_TOKENS


async def _engine_says(response: aiohttp.ClientResponse) -> str:
    return f"HTTP {response.status} from its engine: {(await response.text())[:200]}"


async def _send_error(response: aiohttp.ClientResponse, send: Send) -> None:
    body = json.dumps(normalise(await response.read(), response.status)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
