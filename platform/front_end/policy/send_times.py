"""Which of a front end's requests an engine has counted in the load that it tells."""

from __future__ import annotations

from collections import deque

# A request is booked so long before it is sent, at most.
_BOOKED_BEFORE_S = 0.005


class SendTimes:
    """When requests were sent to an engine that has not counted them yet, in this process's clock.

    Requests arrive in the order sent. So the load of an engine that has counted ``n`` holds what
    was booked until the one after the ``n``-th, and nothing later.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._counted_at = 0.0
        self._uncounted: deque[float] = deque()

    def sent(self, now: float) -> None:
        self._sent += 1
        self._uncounted.append(now)

    def counted(self, requests: int, now: float) -> float:
        """Until when bookings are in a load that comes ``now`` and counts so many requests."""
        while self._uncounted and self._sent - len(self._uncounted) < requests:
            self._counted_at = self._uncounted.popleft()
        if not self._uncounted:
            return now
        # As late as can be: a load of long ago counts for nothing.
        return max(self._counted_at, self._uncounted[0] - _BOOKED_BEFORE_S)
