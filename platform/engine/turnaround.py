"""Times of requests in an engine, by its outputs: pure, seconds of one clock.

vLLM's EngineCore tells when a request was scheduled or preempted only with that request's next
output. So who waits now is inferred: as long as the engine says that some do, it is those that had
no output in its last step. A prompt whose computation takes several steps counts among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

# So many finished requests make the mean.
_RECENT = 100


class Finished(NamedTuple):
    """A request's stay in the engine. ``weighted_turnaround`` is (finish - arrival) / (finish -
    first scheduled), at least 1: AdaptiveLLM, eq. 5."""

    weighted_turnaround: float
    preemptions: int


@dataclass(slots=True)
class _Request:
    arrived_at: float
    started_at: float | None = None
    preemptions: int = 0


class Turnaround:
    """The requests of one engine, from their arrival to their end."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._waiting = 0
        self._answered: set[str] = set()
        self._answered_before: set[str] = set()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def arrived(self, request_id: str, now: float) -> None:
        """A request has come, or more of the input of a known one."""
        self._requests.setdefault(request_id, _Request(now))

    def scheduled(self, request_id: str, at: float) -> None:
        """It started at that time, or went on after a preemption."""
        request = self._requests.get(request_id)
        if request is not None and request.started_at is None:
            request.started_at = max(at, request.arrived_at)

    def preempted(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.preemptions += 1

    def answered(self, request_ids: Iterable[str]) -> None:
        """The step had outputs for these; it need not be told where nobody waits after it."""
        self._answered.update(request_ids)

    def step(self, waiting: int) -> None:
        """All outputs of a step are in; ``waiting`` requests wait now, as the engine counts."""
        self._waiting = waiting
        self._answered_before, self._answered = self._answered, set()

    def finished(self, request_id: str, now: float) -> Finished | None:
        """Forget a request that has its whole answer; None if it never started."""
        request = self._requests.pop(request_id, None)
        if request is None or request.started_at is None or request.started_at >= now:
            return None
        weighted = (now - request.arrived_at) / (now - request.started_at)
        self._recent.append(weighted)
        return Finished(weighted, request.preemptions)

    def left(self, request_id: str) -> None:
        """Forget a request that nobody waits for any more."""
        self._requests.pop(request_id, None)

    def oldest_waiting_s(self, now: float) -> float:
        """How long ago the oldest of the requests that wait arrived; 0 if none waits."""
        if not self._waiting:
            return 0.0
        quiet = self._requests.keys() - self._answered_before - self._answered
        return now - min((self._requests[each].arrived_at for each in quiet), default=now)

    @property
    def mean_weighted_turnaround(self) -> float | None:
        """Of the last hundred finished requests; None before the first."""
        return fmean(self._recent) if self._recent else None
