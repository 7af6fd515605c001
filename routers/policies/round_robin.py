"""Round robin."""

from __future__ import annotations

from loomserve.routers.base import Candidates, Choice
from loomserve.routers.policy import RoutedRequest, RoutingPolicy


def pick(candidates: Candidates, *, turn: int) -> Choice:
    """The replica whose turn it is in the order of ids; ``turn`` is the number of the request."""
    return Choice(turn % len(candidates), "round_robin")


class RoundRobin(RoutingPolicy):
    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        return pick(candidates, turn=self.model.turn)
