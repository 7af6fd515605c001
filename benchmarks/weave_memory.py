"""How the memory of two engines is divided in the arms of :mod:`benchmarks.weave`, in KV blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Division:
    """What there is.

    Attributes:
        own: blocks of the hot engine.
        lent: those that the cold engine lends, its own where nothing is lent.
        cold: what the cold engine has beside them.
    """

    own: int
    lent: int
    cold: int

    @property
    def total(self) -> int:
        return self.own + self.lent + self.cold

    def with_ratio(self, lent_over_own: float) -> Division:
        """The same blocks in all, with so many times as many lent as own."""
        both = self.own + self.lent
        own = round(both / (1 + lent_over_own))
        return replace(self, own=own, lent=both - own)


class Shares(NamedTuple):
    """Blocks of the engines of an arm."""

    hot: int
    cold: int


def divisions(of: Division) -> Mapping[str, Shares]:
    """By arm; each has all of the memory."""
    apart = Shares(of.own, of.cold + of.lent)
    joined = Shares(of.own + of.lent, of.cold)
    return {
        **dict.fromkeys(("stock", "dedicated", "steps", "operators", "slices"), apart),
        "local": joined,
        # Halves of the layers of both on either core: the two have all memory at once.
        "multiplexed": joined,
    }
