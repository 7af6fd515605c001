"""Orders of an owner, of whom there is one at a time. Pure.

An owner takes its generation with what it owns (:mod:`loomserve.platform.base.sqlite`), and all
that it orders bears it. Who is ordered something keeps to the latest generation it has heard of, so
that an order that an earlier owner gave late changes nothing.
"""

from __future__ import annotations

from loomserve.platform.base.errors import TakenOver


class LatestGeneration:
    """What one receiver of orders has heard of."""

    def __init__(self) -> None:
        self._latest = 0

    def admits(self, generation: int) -> bool:
        """Whether an order counts: none of a later generation has come."""
        if generation < self._latest:
            return False
        self._latest = generation
        return True

    def check(self, generation: int) -> None:
        """
        Raises:
            TakenOver: an order does not count.
        """
        if not self.admits(generation):
            raise TakenOver("another owner has taken over: send it again")
