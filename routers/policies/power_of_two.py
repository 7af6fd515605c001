"""Power of two choices (Mitzenmacher, 2001): of two random replicas, the shorter queue."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loomserve.routers.base import Decision, Replica


def pick(replicas: Sequence[Replica], *, rng: random.Random) -> Decision:
    """Of two different random replicas, the one with the shorter queue; a tie falls to chance."""
    two = rng.sample(replicas, k=min(2, len(replicas)))
    return Decision(min(two, key=lambda r: r.queue_length).id, "power_of_two")
