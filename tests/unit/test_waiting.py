"""What waits in tests ends with what it waits for, and fails only who waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests import waiting
from tests.waiting import PATIENCE_S, fastest, within


class Clock:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "_LOOK_S", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


def test_it_waits_longer_than_an_idle_machine_takes(clock: Clock) -> None:
    within(5, lambda: clock.now > 1000 + PATIENCE_S)
    assert 1000 + PATIENCE_S < clock.now < 1005 + PATIENCE_S


def test_it_does_not_wait_once_it_holds(clock: Clock) -> None:
    within(5, lambda: True)
    assert clock.now == 1000


def test_who_waits_for_ever_fails(clock: Clock) -> None:
    with pytest.raises(AssertionError, match=f"it does not hold after {5 + PATIENCE_S:g} s"):
        within(5, lambda: False)


def test_the_fastest_run_counts(clock: Clock) -> None:
    takes: Iterator[float] = iter([3.0, 0.25, 70.0])
    assert fastest(lambda: clock.sleep(next(takes)), 3) == 0.25
