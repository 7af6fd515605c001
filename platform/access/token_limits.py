"""Limits of one API key in tokens: a minute and a day.

What a request costs is known when its answer has ended. So one is admitted as long as a token is
left, and charged afterwards; what was taken too much is waited off before the next. The minute's
limit is a token bucket of ten seconds' worth, in the form that :mod:`.limits` explains; the day's
is a count that starts anew at midnight UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from loomserve.platform.access.limits import burst
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey

_NS = 10**9
_INTERVAL = 60 * _NS
_DAY_S = 86_400
TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens that one API key has used."""

    full_at: int | None = None
    """When the minute's bucket is full again: nanoseconds of the caller's clock times ``rate``.
    None before the first charge."""
    rate: int | None = None
    """The limit that ``full_at`` was counted by; at another one the bucket is full again."""
    day: int = 0
    """The last day with a charge: whole days of Unix time."""
    of_day: int = 0
    """Tokens of that day."""


def day_of(unix_s: float) -> int:
    """Whole days of Unix time."""
    return int(unix_s // _DAY_S)


def is_limited(key: ApiKey) -> bool:
    return key.tokens_per_minute is not None or key.tokens_per_day is not None


def check_tokens(key: ApiKey, usage: TokenUsage, now_s: float, unix_s: float) -> None:
    """Check that a key has a token left at ``now_s``, which is ``unix_s`` of Unix time.

    Raises:
        TooManyRequests: it has none; ``retry_after_s`` is exact.
    """
    of_day = usage.of_day if usage.day == day_of(unix_s) else 0
    if key.tokens_per_day is not None and of_day >= key.tokens_per_day:
        midnight_s = (usage.day + 1) * _DAY_S
        raise TooManyRequests(
            f"API key {key.name!r} has used its {key.tokens_per_day} tokens of this day. Try again "
            f"from {datetime.fromtimestamp(midnight_s, UTC):%Y-%m-%d %H:%M} UTC.",
            reason=TOKEN_LIMIT_EXCEEDED,
            retry_after_s=midnight_s - unix_s,
        )
    rate = key.tokens_per_minute
    if rate is not None:
        wait = _until_full(usage, rate, now_s) - (burst(rate) - 1) * _INTERVAL
        if wait > 0:
            wait_s = wait / (rate * _NS)
            raise TooManyRequests(
                f"API key {key.name!r} is over its {rate} tokens a minute. "
                f"Try again in {wait_s:.1f} s.",
                reason=TOKEN_LIMIT_EXCEEDED,
                retry_after_s=wait_s,
            )


def charge_tokens(
    key: ApiKey, usage: TokenUsage, tokens: int, now_s: float, unix_s: float
) -> TokenUsage:
    """The key's usage with ``tokens`` more; times as for :func:`check_tokens`."""
    day = day_of(unix_s)
    of_day = usage.of_day if usage.day == day else 0
    usage = replace(usage, day=day, of_day=of_day + tokens)
    rate = key.tokens_per_minute
    if rate is None:
        return usage
    now = int(now_s * _NS) * rate
    full_at = now + _until_full(usage, rate, now_s) + tokens * _INTERVAL
    return replace(usage, full_at=full_at, rate=rate)


def tokens_left(rate: int, usage: TokenUsage, now_s: float) -> tuple[int, float]:
    """Tokens left of the minute's bucket, not below 0, and seconds until it is full again."""
    until_full = _until_full(usage, rate, now_s)
    return max(0, burst(rate) - -(-until_full // _INTERVAL)), until_full / (rate * _NS)


def _until_full(usage: TokenUsage, rate: int, now_s: float) -> int:
    if usage.full_at is None or usage.rate != rate:
        return 0
    return max(0, usage.full_at - int(now_s * _NS) * rate)
