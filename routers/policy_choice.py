"""The choice of a replica by a model's policy, from replicas' reports to the booking."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

from loomserve.platform.config.router import RoutingPolicy
from loomserve.routers.base import Decision, Pick, Replica
from loomserve.routers.block_keys import BLOCK_TOKENS
from loomserve.routers.decision import candidates, decide
from loomserve.routers.policies import load_aware, power_of_two, prefix_aware, round_robin
from loomserve.routers.snapshot import RoutingStats, snapshot
from loomserve.routers.ticket import RoutingTicket


class ReplicaChooser:
    """Chooses replicas of one model for whoever sends requests to them.

    The requests of a process have one ledger, which tickets bring along, so several choosers of a
    model see each other's requests. Each has its own turns and random numbers.
    """

    def __init__(
        self, model: str, policy: RoutingPolicy, *, load_limit: float, stale_after_s: float
    ) -> None:
        """See :class:`loomserve.platform.config.Router`."""
        self._model = model
        self._policy = policy
        self._load_limit = load_limit
        self._stale_after_s = stale_after_s
        self._rng = random.Random()
        # Processes start at different turns, or they would all favour the same replica.
        self._turns = itertools.count(self._rng.randrange(2**16))

    def decide(
        self, stats: Mapping[str, RoutingStats | None], ticket: RoutingTicket
    ) -> Decision | None:
        """Choose a replica for a request, and book it there.

        ``stats`` has the last report of each replica that there is, by id; None: it has sent none.
        What was sent to replicas that are not in it is forgotten. None: no replica may take it.
        """
        eligible = self._eligible(stats, ticket)
        decision = decide(eligible, self._pick(ticket))
        if decision is None:
            return None
        chosen = next(replica for replica in eligible if replica.id == decision.replica_id)
        ticket.book(chosen)
        ticket.ledger.decided(self._model, self._policy, decision.reason)
        if self._policy == "prefix_aware":
            self._note_prefix(stats, ticket, chosen)
        return decision

    def _eligible(
        self, stats: Mapping[str, RoutingStats | None], ticket: RoutingTicket
    ) -> Sequence[Replica]:
        return candidates(
            [snapshot(id_, report, ticket.ledger) for id_, report in stats.items()],
            exclude=ticket.exclude,
            pinned_to=ticket.pinned_to,
            now=time.monotonic(),
            stale_after_s=self._stale_after_s,
        )

    def _pick(self, ticket: RoutingTicket) -> Pick:
        match self._policy:
            case "load_aware":
                return partial(load_aware.pick, load_limit=self._load_limit)
            case "round_robin":
                return partial(round_robin.pick, turn=next(self._turns))
            case "power_of_two":
                return partial(power_of_two.pick, rng=self._rng)
            case "prefix_aware":
                return partial(
                    prefix_aware.pick,
                    matched=ticket.ledger.prefixes(self._model).match(ticket.block_keys),
                    blocks=len(ticket.block_keys),
                    prompt_tokens=ticket.prompt_tokens,
                    load_limit=self._load_limit,
                )

    def _note_prefix(
        self, stats: Mapping[str, RoutingStats | None], ticket: RoutingTicket, chosen: Replica
    ) -> None:
        capacity = chosen.kv_capacity_tokens
        index = ticket.ledger.prefixes(self._model)
        index.retain(stats.keys())
        index.sent(
            chosen.id,
            ticket.block_keys,
            most_keys=None if capacity is None else capacity // BLOCK_TOKENS,
        )
