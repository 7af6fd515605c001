"""Forwards a request to the engine of its model that the router chooses, or to another.

What no engine has taken is sent to the next. An engine that ends while it has a request may have
ended because of it, so such a request is sent on once at most, and no engine is asked of which it
is known that two have ended. Once an answer has begun, a failure ends it with an error event.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Sequence
from functools import partial

import aiohttp
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Send

from loomserve.deployments.gateway.answering import CollectedAnswer, ForwardRequest, never_gone
from loomserve.deployments.gateway.lateness import refuse_if_late
from loomserve.deployments.gateway.relay import (
    Destination,
    EngineEndedWithItError,
    NotTakenError,
    Relay,
)
from loomserve.platform.base.errors import QUERY_OF_DEATH, EngineGone, Unavailable
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.http.client_gone import ClientGoneError, while_connected
from loomserve.platform.http.engine_errors import no_replica
from loomserve.platform.lengths.predict.request import longest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.requests.prefix import prefix_keys
from loomserve.platform.requests.query_of_death import QueriesOfDeath
from loomserve.routers.in_flight import InFlight
from loomserve.routers.ticket import RoutingTicket

# How long a request waits for any replica before it is refused.
_ROUTE_TIMEOUT_S = 30.0
# A retry looks for another replica, as does whoever pinned the request; one that is only just
# starting is not worth the wait.
_REROUTE_TIMEOUT_S = 1.0
# Replicas that do not take a request, and engines that end with it.
_MOST_NOT_TAKEN = 3
_MOST_ENDED = 2
_RETRY_AFTER_S = 5.0
# A rough bound for routing only; engines count exactly.
_BYTES_PER_TOKEN = 4
_ANSWER_TOKENS = 256
_DIGEST_BYTES = 16


class Forwarder:
    """Finds the engines that answer requests, and relays the answers."""

    def __init__(
        self, internal_token: str, metrics: GatewayMetrics, *, idle_timeout_s: float
    ) -> None:
        """``idle_timeout_s``: an answer that has begun ends after so long without a byte."""
        self._metrics = metrics
        self._relay = Relay(internal_token, metrics, idle_timeout_s=idle_timeout_s)
        self._deadly = QueriesOfDeath(time.monotonic)
        self.ledger = InFlight()
        """The requests that this gateway has open on engines."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session whose connections to the platform's own processes are kept."""
        return self._relay.session

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        """The body of an engine's answer to a GET request; raises what the relay raises."""
        return await self._relay.get(address, path, timeout_s)

    def set_models(self, routes: Collection[ModelRoute]) -> None:
        """Nothing: the router knows the replicas from Serve."""

    def pages(self, model: str, replica_id: str) -> Sequence[str]:
        """None: replicas have their metrics themselves."""
        return ()

    async def close(self) -> None:
        await self._relay.close()

    async def forward(
        self, request: ForwardRequest, handle: DeploymentHandle, receive: Receive, send: Send
    ) -> None:
        """Answer the request, or stop as soon as the client is gone.

        Raises:
            Unavailable: no replica took it in time.
            TooManyRequests: it is predicted to end after ``request.refuse_after``.
            EngineGone: engines ended before or while answering.
            InternalError: the engine failed on it.
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
        ended = False
        for _ in range(_MOST_NOT_TAKEN + _MOST_ENDED - 1):
            self._refuse_if_deadly(request)
            try:
                with self._ticket(request, excluded) as ticket:
                    replica = await self._choose(request, handle, ticket)
                    if not excluded:
                        refuse_if_late(request, ticket, self._metrics)
                    await self._relay.answer(replica, request.content, request.request_id, send)
            except NotTakenError:
                self._metrics.engine_failed(request.model)
            except EngineEndedWithItError as failure:
                self._metrics.engine_failed(request.model)
                if self._others_ended(request, replica.replica_id) or failure.begun:
                    raise _engine_gone(request) from None
                ended = True
            except Unavailable:
                if ended:
                    raise _engine_gone(request) from None
                if excluded:
                    break  # that replicas are restarted says more than that there is no other
                raise
            else:
                if self._deadly:
                    self._deadly.answered(_digest(request))
                return
            if request.pinned_to is not None:
                break
            excluded |= {replica.replica_id}
        if ended:
            raise _engine_gone(request)
        raise Unavailable(
            f"no replica of model {request.model!r} takes requests now; those that did are being "
            "restarted, try again shortly",
            reason="no_replica",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _others_ended(self, request: ForwardRequest, replica_id: str) -> bool:
        """Note that a replica's engine ended, and tell whether others had ended likewise."""
        digest = _digest(request)
        others = self._deadly.replicas(digest) - {replica_id}
        self._deadly.ended(digest, replica_id)
        return bool(others)

    def _refuse_if_deadly(self, request: ForwardRequest) -> None:
        if self._deadly and len(self._deadly.replicas(_digest(request))) >= _MOST_ENDED:
            raise EngineGone(
                f"{_MOST_ENDED} engines of model {request.model!r} ended while they worked on this "
                "very request, so no other is asked for a minute. Change the request, or give the "
                f"operator its id, {request.request_id}",
                reason=QUERY_OF_DEATH,
            )

    def _ticket(self, request: ForwardRequest, excluded: frozenset[str]) -> RoutingTicket:
        return RoutingTicket(
            self.ledger,
            prompt_tokens=len(request.content.encoded) // _BYTES_PER_TOKEN,
            hash_prompt=partial(prefix_keys, request.content),
            output_tokens=_output_tokens(request),
            sequences=request.content.sequences,
            exclude=excluded,
            pinned_to=request.pinned_to,
        )

    async def _choose(
        self, request: ForwardRequest, handle: DeploymentHandle, ticket: RoutingTicket
    ) -> Destination:
        """The replica that the router has booked the request on."""
        no_wait = bool(ticket.exclude) or ticket.pinned_to is not None
        with self._metrics.queued(request.model):
            try:
                async with asyncio.timeout(_REROUTE_TIMEOUT_S if no_wait else _ROUTE_TIMEOUT_S):
                    async with handle.choose_replica(ticket, _reserve=False) as selection:
                        return Destination(
                            request.model,
                            selection.replica_id,
                            selection.replica_metadata["address"],
                        )
            except (TimeoutError, DeploymentUnavailableError, RayServeException):
                raise no_replica(request.model) from None


def _output_tokens(request: ForwardRequest) -> int:
    if request.expected_tokens is not None:
        return math.ceil(request.expected_tokens)
    return longest(request.content.fields) or _ANSWER_TOKENS


def _digest(request: ForwardRequest) -> bytes:
    content = request.content
    sent = content.encoded if request.received is None else request.received
    digest = hashlib.blake2b(content.path.encode(), digest_size=_DIGEST_BYTES)
    digest.update(sent)
    return digest.digest()


def _engine_gone(request: ForwardRequest) -> EngineGone:
    return EngineGone(
        f"the engine of model {request.model!r} ended while it worked on this request; send it "
        f"again. If that happens again, give the operator its id, {request.request_id}"
    )
