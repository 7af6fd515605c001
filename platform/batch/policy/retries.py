"""Retries of work on a batch that fails, further and further apart, until it is given up."""

from __future__ import annotations

MOST_FAILURES = 5
_FIRST_PAUSE_S = 1.0


class Retries:
    """Failures of work on batches, by their ids; ``now`` is seconds of one clock."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._again_at: dict[str, float] = {}

    def may_try(self, batch_id: str, now: float) -> bool:
        return self._again_at.get(batch_id, now) <= now

    def failed(self, batch_id: str, now: float) -> bool:
        """Count a failure, and return whether it was the last."""
        failures = self._failures[batch_id] = self._failures.get(batch_id, 0) + 1
        self._again_at[batch_id] = now + _FIRST_PAUSE_S * 2 ** (failures - 1)
        return failures >= MOST_FAILURES

    def wait(self, batch_id: str, until: float) -> None:
        """Try again at a time, for what is no failure of the batch's own."""
        self._again_at[batch_id] = until

    def went_well(self, batch_id: str) -> None:
        self._failures.pop(batch_id, None)
        self._again_at.pop(batch_id, None)
