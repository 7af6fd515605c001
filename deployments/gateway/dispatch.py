"""Interface between the gateway's endpoints and the dispatcher of requests to models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from starlette.types import Receive, Send

from loomserve.platform.http.asgi import CollectedAnswer, never_gone
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.tracing import RequestTrace


@dataclass(frozen=True)
class ModelRequest:
    """A request to ``model``, checked, and what its routing depends on."""

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
    """False: its sender finds out whether engines end because of it."""
    refuse_after: float | None = None
    """Monotonic seconds; a request that is predicted to end later is refused."""
    is_first: bool = False
    """Whether it is the platform's own, to see whether the replica that it is pinned to answers."""
    usage: RequestUsage = field(default_factory=RequestUsage)
    """Whoever answers it adds up here what engines computed."""
    trace: RequestTrace | None = None
    """Its outcome goes there, if it is recorded; None: it has no trace."""

    @property
    def recorded(self) -> RequestTrace | None:
        """Its trace, if that is recorded."""
        return self.trace if self.trace is not None and self.trace.recorded else None


class Dispatching(ABC):
    """Has models answer requests."""

    @abstractmethod
    async def dispatch(self, request: ModelRequest, receive: Receive, send: Send) -> None:
        """Answer the request, or stop once the client is gone; RequestError: there is no answer."""

    async def collect(
        self, request: ModelRequest, receive: Receive = never_gone
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a request of the platform's own; raises as dispatch."""
        collected = CollectedAnswer()
        await self.dispatch(request, receive, collected.send)
        return collected.status, bytes(collected.body)
