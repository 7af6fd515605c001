"""Silence is counted only while somebody listens, and could be heard."""

from __future__ import annotations

import pytest

from loomserve.platform.engine.process.attentive_clock import (
    AttentiveClock,
    PeerClock,
    ToldWork,
    Work,
)


def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    now = 100.0
    clock = AttentiveClock(lambda: now, most_s=0.5)
    now += 0.25
    clock.tick()
    assert clock() == 0.25
    now += 60
    assert clock() == 0.75
    clock.tick()
    now += 0.125
    assert clock() == 0.875


class Engine:
    """An engine of numbers, looked at once a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.work: Work | None = Work(0.0)
        self.looks = 0
        self.clock = PeerClock(lambda: self.now, self.look)

    def look(self) -> Work | None:
        self.looks += 1
        return self.work

    def passes(self, seconds: int, cpu_s: float, *, wants: bool = False) -> float:
        """What counts of so many seconds, in each of which it has so much of cores."""
        self.clock.tick(late=True)
        counted = self.clock()
        for _ in range(seconds):
            self.now += 1
            if self.work is not None:
                self.work = Work(self.work.cpu_s + cpu_s, wants)
            self.clock.tick(late=True)
        return self.clock() - counted


def test_an_engine_that_works_or_would_is_slow_and_one_that_sleeps_is_not() -> None:
    assert Engine().passes(30, 0.01) == pytest.approx(30)
    assert Engine().passes(30, 1.0) == pytest.approx(3)
    assert Engine().passes(30, 8.0) == pytest.approx(3), "many cores count as one"
    assert Engine().passes(30, 0.0, wants=True) == pytest.approx(0.3)
    unseen = Engine()
    unseen.work = None
    assert unseen.passes(30, 1.0) == 30


def test_an_engine_that_speaks_and_steps_is_not_looked_at() -> None:
    engine = Engine()
    for _ in range(5):
        engine.now += 1
        engine.clock.tick(late=False)
    assert (engine.clock(), engine.looks) == (5, 0)


def test_an_engine_elsewhere_is_as_busy_as_it_told_last() -> None:
    now = 10.0
    told = ToldWork(lambda: now)
    assert told() is None
    told.told(3.0)
    assert told() is None
    now += 2
    told.told(4.0)
    assert told() == Work(4.0)
    now += 4
    assert told() == Work(6.0)
