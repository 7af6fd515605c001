"""How much of the platform keys and batches have had: virtual token counters.

Whoever comes with nothing counted is lifted to the least of those already waiting, or it would have
everything until it has caught up with a past in which it asked for nothing (Sheng et al., OSDI
2024, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class TokenCounters:
    """Tokens served, by key or by batch."""

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}

    def join(self, who: Hashable, waiting: Iterable[Hashable]) -> None:
        """``who`` waits for its turn from now on, beside others that waited before."""
        least = min((self.of(other) for other in waiting if other != who), default=0.0)
        self._served[who] = max(self.of(who), least)

    def add(self, who: Hashable, tokens: float) -> None:
        self._served[who] = self.of(who) + tokens

    def of(self, who: Hashable) -> float:
        return self._served.get(who, 0.0)

    def forget(self, who: Hashable) -> None:
        self._served.pop(who, None)
