"""The choice of a replica by a model's policy, from its table of replicas to the booking."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from loomserve.platform.config.router import ROUTING_POLICIES
from loomserve.routers.base import Choice, Decision
from loomserve.routers.policy import RoutedModel, RoutingPolicy
from loomserve.routers.table import ReplicaTable
from loomserve.routers.ticket import RoutingTicket

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
