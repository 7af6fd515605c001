"""Virtual token counters: how much of the platform keys and batches have had.

The counter of a newcomer is lifted to the least of those that wait already. At zero it would get
everything until it had caught up with a past in which it asked for nothing (Sheng et al., OSDI
2024, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class TokenCounters:
    """Counters of tokens served, by key and by batch."""

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}

    def join(self, who: Hashable, waiting: Iterable[Hashable]) -> None:
        """Let ``who`` wait for its turn, beside others that wait already."""
        least = min((self.of(other) for other in waiting if other != who), default=0.0)
        self._served[who] = max(self.of(who), least)

    def add(self, who: Hashable, tokens: float) -> None:
        self._served[who] = self.of(who) + tokens

    def of(self, who: Hashable) -> float:
        return self._served.get(who, 0.0)

    def forget(self, who: Hashable) -> None:
        self._served.pop(who, None)
