"""Round robin."""

from __future__ import annotations

from loomserve.routers.base import Candidates, Choice


def pick(candidates: Candidates, *, turn: int) -> Choice:
    """The replica whose turn it is in the order of ids; ``turn`` is the number of the request."""
    return Choice(turn % len(candidates), "round_robin")
