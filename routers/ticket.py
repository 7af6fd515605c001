"""The ticket with which a request passes a router."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loomserve.routers.base import Replica
from loomserve.routers.in_flight import Booking, InFlight


@dataclass(eq=False)
class RoutingTicket(Booking):
    """One attempt of one request to be answered by a replica.

    Whoever sends the request fills the ticket in, the router books it on the replica that it
    chooses, and :meth:`close` ends the booking, whether or not there was one.
    """

    ledger: InFlight
    prompt_tokens: int = 0
    """The prompt's length; an estimate, if the sender has no tokens."""
    hash_prompt: Callable[[], tuple[int, ...]] = tuple
    """Makes the keys of the prompt's blocks, if the policy asks for them; see ``block_keys.py``."""
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
    _keys: tuple[int, ...] | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        """KV cache the request is expected to come to need, in tokens."""
        return self.prompt_tokens + self.output_tokens * self.sequences

    @property
    def block_keys(self) -> tuple[int, ...]:
        """Chained keys of the prompt's full blocks; the sender's tokens, if it has them."""
        if self._keys is None:
            self._keys = self.hash_prompt()
        return self._keys

    def book(self, replica: Replica, now: float) -> None:
        """Raise the replica's load by the request's estimate."""
        self.replica = replica
        self.ledger.started(self, replica.id, self.tokens, now, sequences=self.sequences)

    def close(self) -> None:
        """End the booking, if there is one, and allow no other."""
        self.ledger.finished(self, time.monotonic())
