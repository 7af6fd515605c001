"""What the gateway's endpoints ask of whoever has engines answer requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from starlette.types import Message, Receive, Send

from loomserve.deployments.gateway.store_readings import StoreReadings
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.tracing import RequestTrace
from loomserve.routers.in_flight import InFlight


@dataclass(frozen=True)
class ForwardRequest:
    """A request to an engine of ``model``, and what its routing depends on."""

    model: str
    content: EngineRequest
    request_id: str
    pinned_to: str | None = None
    """Id of the only replica that may take it; None: any may."""
    expected_tokens: float | None = None
    """Predicted length of the answer: the mean."""
    median_tokens: float | None = None
    """As likely exceeded as not; there is one where there is a mean."""
    carried_on: bool = True
    """False: whoever sent it finds out whether engines end because of it."""
    refuse_after: float | None = None
    """Monotonic seconds; a request that is predicted to end later is refused."""
    is_first: bool = False
    """Whether it is the platform's own, to see whether the replica that it is pinned to answers."""
    usage: RequestUsage = field(default_factory=RequestUsage)
    """Whoever answers it adds up here what engines computed."""
    trace: RequestTrace | None = None
    """What becomes of it is told there, if it is recorded; None: it has no trace."""

    @property
    def recorded(self) -> RequestTrace | None:
        """Its trace, if that is one to tell something."""
        return self.trace if self.trace is not None and self.trace.recorded else None


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


class Answering(Protocol):
    """Has engines answer requests, and keeps connections to the platform's other processes."""

    ledger: InFlight
    """The requests that this gateway has open on engines."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session whose connections to the platform's own processes are kept."""

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        """The body of a replica's answer to a GET request.

        Raises:
            aiohttp.ClientError: the replica cannot be reached.
            TimeoutError: it has not answered in time.
        """

    async def forward(self, request: ForwardRequest, receive: Receive, send: Send) -> None:
        """Answer the request, or stop as soon as the client is gone.

        Raises:
            RequestError: there is no answer, or no whole one.
        """

    async def collect(
        self, request: ForwardRequest, receive: Receive = never_gone
    ) -> tuple[int, bytes]:
        """The status and body of the answer to a request of the platform's own.

        Raises what :meth:`forward` raises.
        """

    def set_models(self, routes: Collection[ModelRoute]) -> None:
        """Set which models and replicas there are; ``routes`` has all models."""

    def set_stores(self, stores: StoreReadings) -> None:
        """Set what the KV stores of several nodes keep, and what fetches take."""

    def is_set_up(self, model: str) -> bool:
        """Whether requests of the model do not wait for its front end."""

    def pages(self, model: str, replica_id: str) -> Sequence[str]:
        """Metrics of a replica that this process has, each page as text."""

    async def close(self) -> None: ...
