"""Power of d choices: of some random replicas, the one with the shortest queue."""

from __future__ import annotations

from pydantic import Field

from loomserve.routers.base import Candidates, Choice, Replica
from loomserve.routers.policy import RoutedRequest, RoutingPolicy


class PowerOfD(RoutingPolicy):
    """Remembers which replica it sent the last request to, and prefers another among equals."""

    class Options(RoutingPolicy.Options):
        choices: int = Field(2, ge=1, description="Replicas that are looked at.")

    last = ""

    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        some = self.model.rng.sample(
            range(len(candidates)), k=min(self.options.choices, len(candidates))
        )
        ids = self.model.replicas.ids
        place = min(
            some,
            key=lambda at: (candidates.queue_length[at], ids[candidates.rows[at]] == self.last),
        )
        return Choice(place, "power_of_d")

    def sent(self, request: RoutedRequest, replica: Replica) -> None:
        self.last = replica.id
