"""The choice of a replica by a model's policy, from its table of replicas to the booking."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.config.router import ROUTING_POLICIES
from loomserve.routers.base import Choice, Decision, Replica
from loomserve.routers.in_flight import Booking, InFlight
from loomserve.routers.policy import RoutedModel, RoutingPolicy
from loomserve.routers.table import ReplicaTable


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


_ONLY = Choice(0, "only_candidate")


class ReplicaChooser:
    """Chooses replicas of one model by a policy, with turns and random numbers of its own. Tickets
    bring along the ledger of the process: choosers of a model see each other's requests."""

    def __init__(
        self,
        model: str,
        policy: str,
        table: ReplicaTable,
        *,
        load_limit: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """By a policy's name; ``table`` is kept up to date by the caller."""
        rng = random.Random()
        # Processes start at different turns, or they would all favour the same replica.
        self.model = RoutedModel(model, table, load_limit, rng, turn=rng.randrange(2**16))
        self._name = policy
        self._policy: RoutingPolicy = ROUTING_POLICIES.make(policy, options or {}, self.model)
        self._table = table

    def decide(self, ticket: RoutingTicket) -> Decision | None:
        """Choose a replica for a request, and book it there; None: no replica may take it."""
        self.model.turn += 1
        now = time.monotonic()
        candidates = self._table.candidates(
            exclude=ticket.exclude, pinned_to=ticket.pinned_to, now=now
        )
        if not len(candidates):
            return None
        choice = self._policy.pick(candidates, ticket) if len(candidates) > 1 else _ONLY
        chosen = self._table.replica(candidates.row(choice.place))
        ticket.book(chosen, now)
        ticket.ledger.decided(self.model.name, self._name, choice.reason)
        self._policy.sent(ticket, chosen)
        return Decision(chosen.id, choice.reason)
