"""Circuit breaker of a batch, which opens when its lines have ended engines.

An engine takes along all lines that it has, of every batch, so each of them is a suspect: until it
is answered, or until it is known as a query of death. A batch with suspects for a model is tested:
of its lines for that model they go first, each alone on an engine. So a batch whose lines are
harmless is soon cleared of ends that it only witnessed, and one whose lines end engines takes no
other's along. What ended before the test, on engines that others had lines on too, is no proof by
itself.
"""

from __future__ import annotations

MOST_ENDS = 3
"""Ends of engines after which a batch is stopped."""


class CircuitBreaker:
    """Ends of engines that are held against one batch, and the lines that may be their cause."""

    def __init__(self) -> None:
        self._ends: dict[str, set[int]] = {}
        self._suspects: dict[int, str] = {}
        self._alone: set[str] = set()
        self._known = False

    @property
    def is_open(self) -> bool:
        """Whether no more lines may leave."""
        return len(self._ends) >= MOST_ENDS and not self._alone.isdisjoint(self._ends)

    def is_testing(self, model: str) -> bool:
        """Whether only suspects may leave for engines of a model, each alone on one."""
        return model in self._suspects.values()

    def most_engines(self, model: str) -> int | None:
        """Most engines that may have lines at once while one of a model is chosen; None: any. Of a
        batch of which no line has been computed nothing is known, so it has one; of one that is
        tested, no more than may still end."""
        if self.is_testing(model):
            return max(1, MOST_ENDS - len(self._ends))
        return None if self._known else 1

    def is_suspect(self, number: int) -> bool:
        return number in self._suspects

    def ended(self, engine: str, number: int, model: str, *, alone: bool) -> None:
        """Note that an engine ended while it had a line (``alone``: no other); no other engine ever
        has its name."""
        self._ends.setdefault(engine, set()).add(number)
        if alone:
            self._alone.add(engine)
        self._suspects[number] = model

    def answered(self, number: int, *, computed: bool) -> None:
        """Note that a line has its answer, so that it is not what an engine ended of. ``computed``:
        an engine has computed it, and not only refused it."""
        self._known = self._known or computed
        self._suspects.pop(number, None)
        for engine in [*self._ends]:
            self._ends[engine].discard(number)
            if not self._ends[engine]:
                del self._ends[engine]

    def condemned(self, number: int) -> None:
        """Note that a line is not sent again; the ends that it may have caused still count."""
        self._suspects.pop(number, None)
