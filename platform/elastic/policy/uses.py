"""How models are used: how busy each was lately, and when it is presumably asked for again."""

from __future__ import annotations

import math

_MEMORY_S = 60.0
# The weight of the newest gap between two uses.
_NEWEST = 0.3


class BusyShares:
    """Exponentially weighted shares of the last minute in which each model had requests."""

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


class ReturnTimes:
    """Exponentially weighted means of the gaps between uses, by model; times are of one clock."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._means: dict[str, float] = {}

    def used(self, model: str, times: int, now: float) -> None:
        """A model was asked for so many times since it was last, evenly spread."""
        if times < 1:
            return
        last = self._last.get(model)
        self._last[model] = now
        if last is None:
            return
        gap = max(0.0, now - last) / times
        mean = self._means.get(model, gap)
        self._means[model] = mean + (1 - (1 - _NEWEST) ** times) * (gap - mean)

    def mean_s(self, model: str) -> float | None:
        """None: it was asked for once at most."""
        return self._means.get(model)
