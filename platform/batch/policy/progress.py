"""The pace of a batch, and when it will be done."""

from __future__ import annotations

from collections import deque

# Long enough that a pause for online requests counts, and short enough that their end does.
_WINDOW_S = 120.0
# A batch is about to be late with less than this share of the time left in reserve.
_RESERVE = 0.3


class BatchPace:
    """Pace of a batch: tokens of lines that finished in the last two minutes.

    Times are seconds of one clock.
    """

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
