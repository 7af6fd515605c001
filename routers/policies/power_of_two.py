"""Power of two choices (Mitzenmacher, 2001): of two random replicas, the shorter queue."""

from __future__ import annotations

import random

from loomserve.routers.base import Candidates, Choice
from loomserve.routers.policy import RoutedRequest, RoutingPolicy


def pick(candidates: Candidates, *, rng: random.Random) -> Choice:
    """Of two different random replicas, the one with the shorter queue; a tie falls to chance."""
    two = rng.sample(range(len(candidates)), k=min(2, len(candidates)))
    queues = candidates.columns.queue_length
    return Choice(min(two, key=lambda at: queues[candidates.row(at)]), "power_of_two")


class PowerOfTwo(RoutingPolicy):
    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        return pick(candidates, rng=self.model.rng)
