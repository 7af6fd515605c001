"""Round robin."""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.routers.base import Decision, Replica


def pick(replicas: Sequence[Replica], *, turn: int) -> Decision:
    """The replica whose turn it is in the order of ids; ``turn`` is the number of the request."""
    ids = sorted(replica.id for replica in replicas)
    return Decision(ids[turn % len(ids)], "round_robin")
