from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey

DAY_S = 86_400.0
NOON_S = 20_000 * DAY_S + DAY_S / 2
RATES = st.integers(1, 60) | st.integers(1, 10**7)
# A deadline would measure how busy the machine is.
untimed = settings(deadline=None)


def key(per_minute: int | None = None, per_day: int | None = None) -> ApiKey:
    return ApiKey(
        name="user",
        hash="sha256:" + "0" * 64,
        tokens_per_minute=per_minute,
        tokens_per_day=per_day,
    )


class Meter:
    """The tokens of one name on clocks that are set."""

    def __init__(self) -> None:
        self.now_s, self.unix_s = 0.0, NOON_S
        self._meter = TokenMeter(
            KeyMetrics(CollectorRegistry()),
            Path("/nowhere"),
            clock=lambda: self.now_s,
            unix_clock=lambda: self.unix_s,
        )

    def charge(self, limited: ApiKey, tokens: int, now_s: float, unix_s: float = NOON_S) -> None:
        self.now_s, self.unix_s = now_s, unix_s
        self._meter.charge(limited, tokens, 0)

    def wait_s(self, limited: ApiKey, now_s: float, unix_s: float = NOON_S) -> float:
        """Seconds that the key is told to wait; 0: it may go on."""
        self.now_s, self.unix_s = now_s, unix_s
        try:
            self._meter.check(limited)
        except TooManyRequests as refusal:
            told = (refusal.code, refusal.retry_after_s)
        else:
            return 0.0
        code, retry_after_s = told
        assert code == "token_limit_exceeded"
        assert retry_after_s is not None
        return retry_after_s

    def left(self, limited: ApiKey, now_s: float) -> tuple[int, float]:
        self.now_s = now_s
        _, (_, left), (_, full_in_s) = self._meter.headers(limited)
        return int(left), float(full_in_s.removesuffix(b"s"))


@untimed
@given(RATES, st.integers(0, 10**6), st.floats(0, 1e6), st.floats(0, 0.999))
def test_the_time_to_wait_is_exact(rate: int, tokens: int, now_s: float, early: float) -> None:
    limited = key(per_minute=rate)
    meter = Meter()
    meter.charge(limited, tokens, now_s)
    told_s = meter.wait_s(limited, now_s)
    burst = -(-rate // 6)
    assert told_s == pytest.approx(max(0, tokens - burst + 1) * 60 / rate, rel=1e-6, abs=1e-6)
    assert not meter.wait_s(limited, now_s + told_s + 1e-6)
    if told_s > 1e-3:
        assert meter.wait_s(limited, now_s + told_s * early - 1e-6)


@untimed
@given(RATES, st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**5)), max_size=50))
def test_what_is_used_stays_within_the_rate_the_burst_and_the_last_request(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    limited, meter, now_s = key(per_minute=rate), Meter(), 5.0
    used = last = 0
    for gap_s, tokens in steps:
        now_s += gap_s
        if not meter.wait_s(limited, now_s):
            meter.charge(limited, tokens, now_s)
            used, last = used + tokens, tokens
    assert used <= -(-rate // 6) + rate / 60 * (now_s - 5.0) + last + 1e-3


def test_a_day_ends_at_midnight_utc() -> None:
    limited, meter = key(per_day=100), Meter()
    meter.charge(limited, 99, 0.0)
    assert not meter.wait_s(limited, 0.0)
    meter.charge(limited, 50, 0.0)
    assert meter.wait_s(limited, 0.0) == DAY_S / 2
    assert meter.wait_s(limited, 0.0, NOON_S + DAY_S / 2 - 1) == 1
    assert not meter.wait_s(limited, 0.0, NOON_S + DAY_S / 2)
    meter.charge(limited, 99, 0.0, NOON_S + DAY_S)
    assert not meter.wait_s(limited, 0.0, NOON_S + DAY_S)


def test_both_limits_hold_and_the_longer_wait_is_told() -> None:
    limited, meter = key(per_minute=60, per_day=100), Meter()
    meter.charge(limited, 40, 0.0)
    assert meter.wait_s(limited, 0.0) == 31
    meter.charge(limited, 60, 100.0)
    assert meter.wait_s(limited, 1000.0) == DAY_S / 2


def test_a_limit_that_is_changed_starts_anew_and_the_day_goes_on() -> None:
    meter = Meter()
    meter.charge(key(per_minute=60, per_day=100), 99, 0.0)
    assert not meter.wait_s(key(per_minute=600), 0.0)
    assert meter.wait_s(key(per_day=99), 0.0)


def test_what_is_left_is_told() -> None:
    limited, meter = key(per_minute=60), Meter()
    assert meter.left(limited, 0.0) == (10, 0.0)
    meter.charge(limited, 4, 0.0)
    assert meter.left(limited, 0.0) == (6, 4.0)
    assert meter.left(limited, 1.5) == (7, 2.5)
    meter.charge(limited, 100, 1.5)
    assert meter.left(limited, 1.5) == (0, 102.5)


def test_a_key_without_limits_is_never_refused() -> None:
    meter = Meter()
    meter.charge(key(), 10**9, 0.0)
    assert not meter.wait_s(key(), 0.0)
