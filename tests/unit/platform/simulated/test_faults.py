"""When a simulated engine has which fault."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from loomserve.platform.config import Fault
from loomserve.platform.simulated import faults
from loomserve.platform.simulated.faults import Faults, moments


class Engine:
    """Faults, with timers and a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *given: Fault) -> None:
        self.now, self.had = 0.0, list[tuple[float, str]]()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        engine = self

        class Timer:
            def __init__(self, seconds: float, come: Callable[[], None]) -> None:
                self._due = (engine.now + seconds, come)

            def start(self) -> None:
                engine.timers.append(self._due)

        def sleep(seconds: float) -> None:
            engine.had.append((engine.now, "hang"))
            engine.now += seconds

        monkeypatch.setattr(faults.threading, "Timer", Timer)
        monkeypatch.setattr(faults.time, "monotonic", lambda: engine.now)
        monkeypatch.setattr(faults.time, "sleep", sleep)
        monkeypatch.setattr(faults.os, "kill", lambda *_: engine.had.append((engine.now, "die")))
        self.faults = Faults(given, "0 core0", lambda work: work())

    def run(self, until: float) -> None:
        while (due := min(self.timers, key=lambda each: each[0], default=None)) and due[0] < until:
            self.timers.remove(due)
            self.now = max(self.now, due[0])
            due[1]()
        self.now = until


def test_a_fault_comes_after_its_seconds_and_again_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(
        monkeypatch,
        Fault(what="hang", after_s=10, seconds=5),
        Fault(what="slow_down", after_s=1000, seconds=50, factor=3),
    )
    engine.faults.begin()
    engine.run(41)
    assert engine.had == [(10, "hang"), (25, "hang"), (40, "hang")]
    slow = []
    for second in range(1000, 2200):
        engine.run(max(second, engine.now))
        slow += [engine.faults.slowness]
    assert slow.count(3.0) == pytest.approx(100, abs=20), "twice, around hangs"
    assert set(slow) == {1.0, 3.0}


def test_a_fault_comes_after_its_requests_and_again_after_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch, Fault(what="die", after_requests=3))
    engine.faults.begin()
    came = []
    for _ in range(9):
        engine.faults.count_request()
        came.append(len(engine.had))
    assert came == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert not engine.timers


def test_who_is_slow_for_good_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, Fault(what="slow_down", after_s=10, factor=3))
    engine.faults.begin()
    engine.run(9.9)
    assert engine.faults.slowness == 1
    engine.run(1e6)
    assert engine.faults.slowness == 3


@pytest.mark.parametrize("when", [{"after_s": 60}, {"after_requests": 60}])
def test_an_engines_moments_are_its_own_and_the_same_in_each_run(when: dict[str, Any]) -> None:
    fault = Fault(what="die", spread=0.5, **when)

    def of(seed: str) -> list[float]:
        return [*islice(moments(fault, seed), 50)]

    assert of("0 core0") == of("0 core0")
    assert of("0 core0") != of("0 core1") != of("1 core1")
    drawn = of("0 core0")
    assert 30 <= min(drawn) < 40 < 80 < max(drawn) <= 90
    exact = moments(Fault(what="die", **when), "0 core0")
    assert [*islice(exact, 3)] == [60, 60, 60]
