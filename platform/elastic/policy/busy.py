"""How hot models are: the share of the last minute in which each had requests."""

from __future__ import annotations

import math

_MEMORY_S = 60.0


class BusyShares:
    """Exponentially weighted shares of time, by model; times are of one clock."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}

    def observe(self, model: str, busy: bool, now: float) -> None:
        """A model has requests at this moment, or none, and since it was seen last."""
        seen_at = self._seen_at.get(model, now)
        old = math.exp(-max(0.0, now - seen_at) / _MEMORY_S)
        self._shares[model] = old * self._shares.get(model, 0.0) + (1 - old) * busy
        self._seen_at[model] = now

    def share(self, model: str) -> float:
        """0 to 1; 0: it has not been seen."""
        return self._shares.get(model, 0.0)
