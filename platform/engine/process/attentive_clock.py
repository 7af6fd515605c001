"""Clocks that stand still while nobody could listen, or the other side could not speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from loomserve.platform.engine.process.policy.silence import counted_against


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


class Work(NamedTuple):
    """What a process and its descendants have done.

    Attributes:
        cpu_s: Seconds on all cores.
        wants: Whether one of their threads would go on if it had a core, or waits for a disk.
    """

    cpu_s: float
    wants: bool = False


class PeerClock:
    """Seconds that count against an engine that does not speak or step.

    Those in which it computes or waits for a core count little
    (:func:`~loomserve.platform.engine.process.policy.silence.counted_against`).
    """

    def __init__(self, clock: Callable[[], float], work: Callable[[], Work | None]) -> None:
        """``clock`` has the seconds in which this process could listen. ``work`` is the engine's so
        far; None: it cannot be seen."""
        self._clock, self._work = clock, work
        self._seen = clock()
        self._before: Work | None = None
        self._counted = 0.0

    def __call__(self) -> float:
        return self._counted

    def tick(self, *, late: bool) -> None:
        """Count what has passed since the last tick. Only of an engine that is ``late`` it asks
        what it does meanwhile."""
        now = self._clock()
        passed_s, self._seen = now - self._seen, now
        work, before = self._work() if late else None, self._before
        if work is not None and before is not None:
            computed_s = work.cpu_s - before.cpu_s
            passed_s = counted_against(passed_s, computed_s, wants=work.wants)
        self._before = work
        self._counted += passed_s


class ToldWork:
    """The work of an engine on another node, by its beats."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: tuple[float, float] | None = None
        self._share: float | None = None

    def told(self, cpu_s: float) -> None:
        """It has had so much time on cores."""
        now = self._clock()
        if self._told is not None and now > self._told[0]:
            self._share = (cpu_s - self._told[1]) / (now - self._told[0])
        self._told = now, cpu_s

    def __call__(self) -> Work | None:
        """As if it had gone on as between its last two beats; None: there were none."""
        if self._told is None or self._share is None:
            return None
        at, cpu_s = self._told
        return Work(cpu_s + self._share * (self._clock() - at))
