"""How busy models were, and the mean time between their uses."""

from __future__ import annotations

import pytest

from loomserve.platform.elastic.policy.uses import BusyShares, ReturnTimes


def test_a_share_follows_the_last_minute() -> None:
    shares = BusyShares()
    assert shares.share("a") == 0.0
    for second in range(300):
        shares.observe("a", second % 4 == 0, second)
    assert shares.share("a") == pytest.approx(0.25, abs=0.05)
    for second in range(300, 360):
        shares.observe("a", False, second)
    assert shares.share("a") == pytest.approx(0.25 * 0.37, abs=0.03)


def test_how_often_one_looks_does_not_matter() -> None:
    seldom, often = BusyShares(), BusyShares()
    for tenth in range(601):
        often.observe("a", True, tenth / 10)
    for second in range(0, 61, 20):
        seldom.observe("a", True, second)
    assert seldom.share("a") == pytest.approx(often.share("a"), abs=1e-9)
    assert often.share("b") == 0.0


def test_even_uses_have_their_gap_and_bursts_shorten_it() -> None:
    times = ReturnTimes()
    assert times.mean_s("a") is None
    for at in range(0, 100, 10):
        times.used("a", 1, at)
    assert times.mean_s("a") == pytest.approx(10)
    times.used("a", 20, 100)
    assert times.mean_s("a") == pytest.approx(0.5, abs=0.1)
    assert times.mean_s("b") is None


def test_nothing_is_no_use() -> None:
    times = ReturnTimes()
    times.used("a", 0, 5.0)
    assert times.mean_s("a") is None
