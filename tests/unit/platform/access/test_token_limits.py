from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.access.token_limits import (
    TokenUsage,
    charge_tokens,
    check_tokens,
    tokens_left,
)
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


def wait_s(limited: ApiKey, usage: TokenUsage, now_s: float, unix_s: float = NOON_S) -> float:
    """Seconds that the key is told to wait; 0: it may go on."""
    try:
        check_tokens(limited, usage, now_s, unix_s)
    except TooManyRequests as refusal:
        told = (refusal.code, refusal.retry_after_s)
    else:
        return 0.0
    code, retry_after_s = told
    assert code == "token_limit_exceeded"
    assert retry_after_s is not None
    return retry_after_s


@untimed
@given(RATES, st.integers(0, 10**6), st.floats(0, 1e6), st.floats(0, 0.999))
def test_the_time_to_wait_is_exact(rate: int, tokens: int, now_s: float, early: float) -> None:
    limited = key(per_minute=rate)
    usage = charge_tokens(limited, TokenUsage(), tokens, now_s, NOON_S)
    told_s = wait_s(limited, usage, now_s)
    burst = -(-rate // 6)
    assert told_s == pytest.approx(max(0, tokens - burst + 1) * 60 / rate, rel=1e-6, abs=1e-6)
    assert not wait_s(limited, usage, now_s + told_s + 1e-6)
    if told_s > 1e-3:
        assert wait_s(limited, usage, now_s + told_s * early - 1e-6)


@untimed
@given(RATES, st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**5)), max_size=50))
def test_what_is_used_stays_within_the_rate_the_burst_and_the_last_request(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    limited, usage, now_s = key(per_minute=rate), TokenUsage(), 5.0
    used = last = 0
    for gap_s, tokens in steps:
        now_s += gap_s
        if not wait_s(limited, usage, now_s):
            usage = charge_tokens(limited, usage, tokens, now_s, NOON_S)
            used, last = used + tokens, tokens
    assert used <= -(-rate // 6) + rate / 60 * (now_s - 5.0) + last + 1e-3


def test_a_day_ends_at_midnight_utc() -> None:
    limited = key(per_day=100)
    usage = charge_tokens(limited, TokenUsage(), 99, 0.0, NOON_S)
    assert not wait_s(limited, usage, 0.0)
    usage = charge_tokens(limited, usage, 50, 0.0, NOON_S)
    assert wait_s(limited, usage, 0.0) == DAY_S / 2
    assert wait_s(limited, usage, 0.0, NOON_S + DAY_S / 2 - 1) == 1
    assert not wait_s(limited, usage, 0.0, NOON_S + DAY_S / 2)
    usage = charge_tokens(limited, usage, 1, 0.0, NOON_S + DAY_S)
    assert usage.of_day == 1


def test_both_limits_hold_and_the_longer_wait_is_told() -> None:
    limited = key(per_minute=60, per_day=100)
    usage = charge_tokens(limited, TokenUsage(), 40, 0.0, NOON_S)
    assert wait_s(limited, usage, 0.0) == 31
    usage = charge_tokens(limited, usage, 60, 100.0, NOON_S)
    assert wait_s(limited, usage, 1000.0) == DAY_S / 2


def test_a_limit_that_is_changed_starts_anew_and_the_day_goes_on() -> None:
    usage = charge_tokens(key(per_minute=60, per_day=100), TokenUsage(), 99, 0.0, NOON_S)
    assert not wait_s(key(per_minute=600), usage, 0.0)
    assert wait_s(key(per_day=99), usage, 0.0)


def test_what_is_left_is_told() -> None:
    usage = TokenUsage()
    assert tokens_left(60, usage, 0.0) == (10, 0.0)
    usage = charge_tokens(key(per_minute=60), usage, 4, 0.0, NOON_S)
    assert tokens_left(60, usage, 0.0) == (6, 4.0)
    assert tokens_left(60, usage, 1.5) == (7, 2.5)
    usage = charge_tokens(key(per_minute=60), usage, 100, 1.5, NOON_S)
    assert tokens_left(60, usage, 1.5) == (0, 102.5)


def test_a_key_without_limits_is_never_refused() -> None:
    usage = charge_tokens(key(), TokenUsage(), 10**9, 0.0, NOON_S)
    assert not wait_s(key(), usage, 0.0)
