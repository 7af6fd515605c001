"""The choice of a replica by a model's policy, from its table of replicas to the booking."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loomserve.platform.config.router import RoutingPolicy
from loomserve.routers.base import Candidates, Choice, Decision, Floats, Replica
from loomserve.routers.block_keys import BLOCK_TOKENS
from loomserve.routers.policies import load_aware, power_of_two, prefix_aware, round_robin
from loomserve.routers.policies.kv_travel import KvLink, KvLinks, tokens_to_compute
from loomserve.routers.table import ReplicaTable
from loomserve.routers.ticket import RoutingTicket


@dataclass(frozen=True)
class NodesKv:
    """What moving a model's KV between nodes takes.

    Attributes:
        token_bytes: KV of a token.
        store_bytes: What the store of a node keeps.
        links: To a node, from a node.
    """

    token_bytes: float
    store_bytes: float
    links: Mapping[tuple[str, str], KvLink]


class _Links(NamedTuple):
    """The links between the table's nodes, and what they were made of."""

    of: NodesKv
    nodes: tuple[str, ...]
    between: KvLinks


class ReplicaChooser:
    """Chooses replicas of one model for whoever sends requests to them.

    The requests of a process have one ledger, which tickets bring along, so several choosers of a
    model see each other's requests. Each has its own turns and random numbers.
    """

    def __init__(
        self, model: str, policy: RoutingPolicy, table: ReplicaTable, *, load_limit: float
    ) -> None:
        """
        Args:
            model: its name.
            policy: see :class:`loomserve.platform.config.Router`, as for ``load_limit``.
            table: its replicas, kept up to date by the caller.
            load_limit: δ_L.
        """
        self._model = model
        self._policy = policy
        self._table = table
        self._load_limit = load_limit
        self._rng = random.Random()
        # Processes start at different turns, or they would all favour the same replica.
        self._turns = itertools.count(self._rng.randrange(2**16))
        self._ids_with_prefixes: frozenset[str] = frozenset()
        self.kv: NodesKv | None = None
        """What is known of KV between nodes; set by the caller. None: nothing is fetched."""
        self._links: _Links | None = None

    def decide(self, ticket: RoutingTicket) -> Decision | None:
        """Choose a replica for a request, and book it there.

        What was sent to replicas that are not in the table is forgotten. None: no replica may take
        the request.
        """
        turn = next(self._turns)
        candidates = self._table.candidates(
            exclude=ticket.exclude, pinned_to=ticket.pinned_to, now=time.monotonic()
        )
        if not len(candidates):
            return None
        choice = (
            self._pick(candidates, ticket, turn)
            if len(candidates) > 1
            else Choice(0, "only_candidate")
        )
        chosen = self._table.replica(int(candidates.rows[choice.place]))
        ticket.book(chosen)
        ticket.ledger.decided(self._model, self._policy, choice.reason)
        if self._policy == "prefix_aware":
            self._note_prefix(ticket, chosen)
        return Decision(chosen.id, choice.reason)

    def _pick(self, candidates: Candidates, ticket: RoutingTicket, turn: int) -> Choice:
        match self._policy:
            case "load_aware":
                return load_aware.pick(candidates, load_limit=self._load_limit)
            case "round_robin":
                return round_robin.pick(candidates, turn=turn)
            case "power_of_two":
                return power_of_two.pick(candidates, rng=self._rng)
            case "prefix_aware":
                return prefix_aware.pick(
                    candidates,
                    missing=self._missing(candidates, ticket),
                    prompt_tokens=ticket.prompt_tokens,
                    load_limit=self._load_limit,
                )

    def _missing(self, candidates: Candidates, ticket: RoutingTicket) -> Floats | None:
        keys, tokens = ticket.block_keys, ticket.prompt_tokens
        matched = ticket.ledger.prefixes(self._model).match(keys, self._table.ids)
        if matched is None:
            return None
        if len(candidates) < len(matched):
            matched = matched.take(candidates.rows)
        share = matched / max(1, len(keys))
        if self.kv is None or len(self._table.nodes) < 2:
            return (1 - share) * tokens
        links = self._links
        if links is None or links.of is not self.kv or links.nodes is not self._table.nodes:
            between = KvLinks.between(self._table.nodes, self.kv.links)
            self._links = links = _Links(self.kv, self._table.nodes, between)
        nodes, s_per_token = self._table.places(candidates.rows)
        return tokens_to_compute(
            (share * tokens).astype(np.int64),
            nodes,
            tokens,
            s_per_token=s_per_token,
            token_bytes=self.kv.token_bytes,
            links=links.between,
        )

    def _note_prefix(self, ticket: RoutingTicket, chosen: Replica) -> None:
        capacity = chosen.kv_capacity_tokens
        if capacity is not None and self.kv is not None:
            # What its engine has forgotten, its node's store still has.
            capacity += int(self.kv.store_bytes / self.kv.token_bytes)
        index = ticket.ledger.prefixes(self._model)
        if self._ids_with_prefixes is not self._table.known_ids:
            self._ids_with_prefixes = self._table.known_ids
            index.retain(self._ids_with_prefixes)
        index.sent(
            chosen.id,
            ticket.block_keys,
            most_keys=None if capacity is None else capacity // BLOCK_TOKENS,
        )
