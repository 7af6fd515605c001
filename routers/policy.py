"""A routing policy: what it is asked, and what it may know. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loomserve.platform.config.policies import PolicyOptions
from loomserve.routers.base import Candidates, Choice, Replica
from loomserve.routers.in_flight import InFlight
from loomserve.routers.table import ReplicaTable


class RoutedRequest(Protocol):
    """A :class:`~loomserve.routers.policy_choice.RoutingTicket`, as policies see it."""

    ledger: InFlight
    prompt_tokens: int
    output_tokens: int
    sequences: int

    @property
    def block_keys(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class KvLink:
    """What fetches between two nodes take, as measured: seconds to begin, then bytes a second."""

    setup_s: float
    bytes_per_s: float


LOAD_SHARE = 0.03
"""What was measured of models of 0.1 to 8 billion parameters is less."""


@dataclass(frozen=True)
class NodesKv:
    """What moving a model's KV from a node's store to its engines, and between nodes takes."""

    token_bytes: float
    store_bytes: float
    """What the store of a node keeps."""
    links: Mapping[tuple[str, str], KvLink]
    """To a node, from a node."""
    load_share: float = LOAD_SHARE
    """What loading a token from the node's store takes, as a share of computing it."""


@dataclass
class RoutedModel:
    """What a policy may know of its model besides the candidates; kept up to date."""

    name: str
    replicas: ReplicaTable
    load_limit: float
    """δ_L, the router's."""
    rng: random.Random
    turn: int
    """The number of the request at hand."""
    kv: NodesKv | None = None
    """What is known of the nodes' KV stores; None: nothing is loaded or fetched."""


class RoutingPolicy:
    """A rule by which a model's requests are given to its replicas, and what it keeps for that.

    Each front end of a model makes one. It reads no clock, and takes random numbers of its model.
    """

    class Options(PolicyOptions):
        """Reads ``router.options``; a policy that takes some has its own."""

    def __init__(self, options: Any, model: RoutedModel) -> None:
        self.options, self.model = options, model

    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        """Choose one of several candidates; the request is booked afterwards."""
        raise NotImplementedError

    def sent(self, request: RoutedRequest, replica: Replica) -> None:
        """Note that a request was booked on a replica, also where nothing was to be picked."""
