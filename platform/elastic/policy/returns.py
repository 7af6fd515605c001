"""When a model is presumably asked for again: the mean time between its last uses."""

from __future__ import annotations

# The weight of the newest gap.
_NEWEST = 0.3


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

    def last_used(self, model: str) -> float | None:
        return self._last.get(model)
