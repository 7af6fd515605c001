"""Silence is counted only while somebody listens."""

from __future__ import annotations

from loomserve.platform.front_end.engine.attentive_clock import AttentiveClock


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
