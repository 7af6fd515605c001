"""A clock that stands still while nobody could listen."""

from __future__ import annotations

from collections.abc import Callable


class AttentiveClock:
    """Seconds in which the event loop ran, as far as :meth:`tick` is called often enough.

    A front end that was stopped, or whose loop was busy, must not take the silence of that time for
    an engine's: what the engine said waits in the sockets.
    """

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        """``most_s`` is the most that passes between two ticks of a loop that runs."""
        self._clock = clock
        self._most_s = most_s
        self._seen = clock()
        self._attended = 0.0

    def __call__(self) -> float:
        return self._attended + self._since()

    def tick(self) -> None:
        self._attended += self._since()
        self._seen = self._clock()

    def _since(self) -> float:
        return min(self._clock() - self._seen, self._most_s)
