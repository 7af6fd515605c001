"""Batches in progress: whose lines are in memory, how fast they go, and when to try again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from loomserve.platform.batch.policy.objects import BatchRecord

# Long enough that a pause for online requests counts, and short enough that their end does.
_WINDOW_S = 120.0
# A batch is about to be late with less than this share of the time left in reserve.
_RESERVE = 0.3
MOST_LINES = 100_000
"""Lines in memory, unless one batch alone has more; those of other batches wait in the store."""
MOST_FAILURES = 5
_FIRST_PAUSE_S = 1.0


class BatchPace:
    """Pace of a batch: tokens of lines that finished in the last two minutes. Times are seconds of
    one clock."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._finished: deque[tuple[float, float]] = deque()

    def finished(self, tokens: float, now: float) -> None:
        self._finished.append((now, tokens))
        self._forget(now)

    def eta_s(self, tokens_left: float, now: float) -> float | None:
        """Seconds until so many tokens more are done; None while no line has finished."""
        self._forget(now)
        since = now - max(self._began_s, now - _WINDOW_S)
        done = sum(tokens for _, tokens in self._finished)
        return tokens_left * since / done if done > 0 and since > 0 else None

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0][0] < now - _WINDOW_S:
            self._finished.popleft()


def is_late(eta_s: float | None, deadline_s: float, now: float) -> bool:
    """Whether a batch is about to miss its deadline."""
    return eta_s is not None and eta_s > (1 - _RESERVE) * (deadline_s - now)


def may_join(batch: BatchRecord, members: Iterable[BatchRecord]) -> bool:
    """Whether a batch's lines may come into memory, beside those of the members. Half of the room
    is left to keys that have nothing in it yet."""
    others = list(members)
    if not others:
        return True
    newcomer = all(other.owner != batch.owner for other in others)
    room = MOST_LINES if newcomer else MOST_LINES // 2
    return sum(other.unanswered for other in others) + batch.unanswered <= room


class Retries:
    """Failures of work on batches, by id, which is retried further and further apart until it
    is given up; ``now`` is seconds of one clock."""

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
