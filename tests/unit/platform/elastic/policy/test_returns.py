"""The mean time between a model's uses."""

from __future__ import annotations

import pytest

from loomserve.platform.elastic.policy.returns import ReturnTimes


def test_even_uses_have_their_gap_and_bursts_shorten_it() -> None:
    times = ReturnTimes()
    assert times.mean_s("a") is None
    for at in range(0, 100, 10):
        times.used("a", 1, at)
    assert times.mean_s("a") == pytest.approx(10)
    times.used("a", 20, 100)
    assert times.mean_s("a") == pytest.approx(0.5, abs=0.1)
    assert times.last_used("a") == 100
    assert times.mean_s("b") is None


def test_nothing_is_no_use() -> None:
    times = ReturnTimes()
    times.used("a", 0, 5.0)
    assert times.last_used("a") is None
