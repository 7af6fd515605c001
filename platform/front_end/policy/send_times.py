"""Which of a front end's requests an engine has counted in the load that it tells."""

from __future__ import annotations

from collections import deque

# A request is booked so long before it is sent, at most.
_BOOKED_BEFORE_S = 0.005


class SendTimes:
    """When a front end sent requests to an engine, as far as that has not counted them.

    Requests arrive in the order in which they were sent. So of an engine that has counted ``n`` the
    load holds what was booked here until the one after the ``n``-th was, and nothing later. All
    times are of the front end's own clock.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._counted_at = 0.0
        self._uncounted: deque[float] = deque()

    def sent(self, now: float) -> None:
        self._sent += 1
        self._uncounted.append(now)

    def counted(self, requests: int, now: float) -> float:
        """Until when what was booked is in a load that comes ``now`` and counts so many."""
        while self._uncounted and self._sent - len(self._uncounted) < requests:
            self._counted_at = self._uncounted.popleft()
        if not self._uncounted:
            return now
        # As late as can be: a load of long ago counts for nothing.
        return max(self._counted_at, self._uncounted[0] - _BOOKED_BEFORE_S)

    def begin_anew(self) -> None:
        """The engine counts from the beginning."""
        self._sent = 0
        self._counted_at = 0.0
        self._uncounted.clear()
