"""A clock in Unix seconds that does not step."""

from __future__ import annotations

import time

import pytest

from loomserve.platform.base.periodic import steady_unix_clock


def test_it_goes_on_from_the_time_of_day_whatever_becomes_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since_boot = 50.0
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: since_boot)
    clock = steady_unix_clock()
    assert clock() == 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: 1_200_000.0)
    assert clock() == 1_000_000.0
    since_boot += 10
    assert clock() == 1_000_010.0


def test_on_this_machine_it_is_the_time_of_day() -> None:
    assert abs(steady_unix_clock()() - time.time()) < 0.1
