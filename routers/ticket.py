"""The ticket with which a request passes a router."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from loomserve.routers.base import Replica
from loomserve.routers.in_flight import Booking, InFlight


@dataclass(eq=False)
class RoutingTicket:
    """One attempt of one request to be answered by a replica.

    Whoever sends the request fills the ticket in, the router books it on the replica that it
    chooses, and leaving the ``with`` block ends the booking, whether or not there was one::

        with RoutingTicket(ledger, prompt_tokens=100) as ticket:
            async with handle.choose_replica(ticket, _reserve=False) as selection:
                ...

    The sender and the router share one process, and the router gets this very object. It brings the
    ledger along, because Serve (2.60) pickles a router's module by value: a ledger that were a
    global there would be a copy, and the sender's another.
    """

    ledger: InFlight
    prompt: str | list[Any] = ""
    """The prompt's text, or the list of chat messages as the client sent them.

    One field has both, for Ray's prefix-aware router takes an attribute named ``messages`` before
    ``prompt`` even if it is None, and accepts either kind under either name."""
    prompt_tokens: int = 0
    """Estimate of the prompt's length."""
    output_tokens: int = 0
    """Tokens that each answer is expected to have; the most it may, if nobody predicts."""
    sequences: int = 1
    """Answers that the replica has at work at once for it."""
    exclude: frozenset[str] = frozenset()
    """Ids of replicas that just failed this request."""
    pinned_to: str | None = None
    """Id of the only replica that may take it; None: any may."""
    replica: Replica | None = field(default=None, init=False)
    """The chosen replica as the router saw it, without this request; None: not routed yet."""
    _booking: Booking = field(default_factory=Booking, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """KV cache the request is expected to come to need, in tokens."""
        return self.prompt_tokens + self.output_tokens * self.sequences

    def book(self, replica: Replica) -> None:
        """Raise the replica's load by the request's estimate."""
        self.replica = replica
        self.ledger.started(
            self._booking, replica.id, self.tokens, time.monotonic(), sequences=self.sequences
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ledger.finished(self._booking, time.monotonic())
