"""Which replica of a node gives its memory back when that runs short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Holder(NamedTuple):
    """A live replica of a node whose memory is short, with its open requests.

    Attributes:
        held_bytes: What its end gives back.
        others: Replicas of its model, on any node, that its requests could go on with.
        may_go: Whether its model comes again when it is asked for.
    """

    replica: str
    model: str
    held_bytes: int
    requests: int
    others: int
    may_go: bool


def gives_back(holders: Iterable[Holder]) -> Holder | None:
    """The one whose end costs least; None: there is none. First idle ones of models that come again
    when they are asked for; then those of whose model there is another, idle before busy; the last
    of its model after those, and if it has requests, after all. Among equals the largest."""
    return min(holders, key=_cost, default=None)


def _cost(holder: Holder) -> tuple[int, int, str]:
    busy = holder.requests > 0
    if holder.may_go and not busy:
        rank = 0
    elif holder.others:
        rank = 2 if busy else 1
    else:
        rank = 4 if busy else 3
    return rank, -holder.held_bytes, holder.replica
