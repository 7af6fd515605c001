"""Limits of one API key in tokens: a minute and a day.

What a request costs is known when its answer has ended. So one is admitted as long as a token is
left, and charged afterwards; what was taken too much is waited off before the next. The minute's
limit is a token bucket of ten seconds' worth, in the form that :mod:`.limits` explains; the day's
is a count that starts anew at midnight UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from loomserve.platform.access.limits import (
    INTERVAL,
    burst,
    filled,
    seconds,
    until_full,
    wait_s,
)
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey

DAY_S = 86_400
TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens that one API key has used."""

    full_at: int | None = None
    """Of the minute's :class:`~.limits.Bucket`."""
    rate: int | None = None
    """Of the same."""
    day: int = 0
    """The last day with a charge: whole days of Unix time."""
    of_day: int = 0
    """Tokens of that day."""


def day_of(unix_s: float) -> int:
    """Whole days of Unix time."""
    return int(unix_s // DAY_S)


def is_limited(key: ApiKey) -> bool:
    return key.tokens_per_minute is not None or key.tokens_per_day is not None


def check_tokens(key: ApiKey, usage: TokenUsage, now_s: float, unix_s: float) -> None:
    """Check that a key has a token left at ``now_s``, which is ``unix_s`` of Unix time.

    Raises:
        TooManyRequests: it has none; ``retry_after_s`` is exact.
    """
    of_day = usage.of_day if usage.day == day_of(unix_s) else 0
    if key.tokens_per_day is not None and of_day >= key.tokens_per_day:
        midnight_s = (usage.day + 1) * DAY_S
        raise TooManyRequests(
            f"API key {key.name!r} has used its {key.tokens_per_day} tokens of this day. Try again "
            f"from {datetime.fromtimestamp(midnight_s, UTC):%Y-%m-%d %H:%M} UTC.",
            reason=TOKEN_LIMIT_EXCEEDED,
            retry_after_s=midnight_s - unix_s,
        )
    rate = key.tokens_per_minute
    if rate is not None:
        wait = wait_s(usage, rate, now_s)
        if wait > 0:
            raise TooManyRequests(
                f"API key {key.name!r} is over its {rate} tokens a minute. "
                f"Try again in {wait:.1f} s.",
                reason=TOKEN_LIMIT_EXCEEDED,
                retry_after_s=wait,
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
    return replace(usage, full_at=filled(usage, rate, now_s, tokens), rate=rate)


def tokens_left(rate: int, usage: TokenUsage, now_s: float) -> tuple[int, float]:
    """Tokens left of the minute's bucket, not below 0, and seconds until it is full again."""
    missing = until_full(usage, rate, now_s)
    return max(0, burst(rate) - -(-missing // INTERVAL)), seconds(missing, rate)
