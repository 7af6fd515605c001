"""The limits of a key and a model that hold over the gateways of all nodes."""

from __future__ import annotations

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.limits import burst
from loomserve.platform.access.policy.pools import Limit, LimitKind
from loomserve.platform.access.shared_counts import of_key
from loomserve.platform.access.token_limits import DAY_S, TOKEN_LIMIT_EXCEEDED, TokenUsage, day_of
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey

_MINUTE_S = 60


def requests_limit(key: ApiKey) -> Limit | None:
    rate = key.requests_per_minute
    return None if rate is None else _rate(key, LimitKind.REQUESTS, rate)


def tokens_limit(key: ApiKey) -> Limit | None:
    rate = key.tokens_per_minute
    return None if rate is None else _rate(key, LimitKind.TOKENS, rate)


def day_limit(key: ApiKey, day: int) -> Limit | None:
    """``day``: whole days of Unix time."""
    most = key.tokens_per_day
    if most is None:
        return None
    return Limit(f"{of_key(key.name)} {day}", LimitKind.DAY, most)


def running_limit(key: ApiKey) -> Limit | None:
    most = key.max_concurrent
    return None if most is None else Limit(of_key(key.name), LimitKind.RUNNING, most)


def model_limit(name: str, most: int) -> Limit:
    """Sequences of a model at once."""
    return Limit(name, LimitKind.RUNNING, most)


def _rate(key: ApiKey, kind: LimitKind, a_minute: int) -> Limit:
    return Limit(of_key(key.name), kind, burst(a_minute), a_minute / _MINUTE_S)


def check_requests(allowances: Allowances, key: ApiKey) -> None:
    """Check that a key may send another request, as far as other gateways matter.

    Raises:
        TooManyRequests: it is over its rate, or its sequences at once.
    """
    check_running(allowances, key, 1)
    limit = requests_limit(key)
    if limit is not None and allowances.room(limit) < 1:
        wait = allowances.refused(limit, 1)
        raise TooManyRequests(
            f"API key {key.name!r} is over its {key.requests_per_minute} requests a minute, over "
            f"all nodes. Try again in {wait:.1f} s.",
            retry_after_s=wait,
        )


def check_running(allowances: Allowances, key: ApiKey, more: int) -> None:
    """Check that a key may have so many more sequences at once.

    Raises:
        TooManyRequests: it may not.
    """
    limit = running_limit(key)
    if limit is not None and allowances.room(limit) < more:
        raise TooManyRequests(
            f"API key {key.name!r} has the sequences running that it may have, "
            f"{key.max_concurrent} over all nodes. Wait until some have ended.",
            reason="concurrency_limit_exceeded",
            retry_after_s=allowances.refused(limit, more),
        )


def check_tokens_elsewhere(
    allowances: Allowances, key: ApiKey, usage: TokenUsage, unix_s: float
) -> None:
    """Check that other nodes leave a key a token, at ``unix_s`` of Unix time.

    Raises:
        TooManyRequests: they leave none.
    """
    day = day_of(unix_s)
    limit = day_limit(key, day)
    if limit is not None:
        of_day = usage.of_day if usage.day == day else 0
        if allowances.room(limit, used=of_day) < 1:
            soon = allowances.refused(limit)
            over = allowances.is_used_up(limit)
            raise _too_many(
                f"{key.tokens_per_day} tokens of this day",
                key,
                (day + 1) * DAY_S - unix_s if over else soon,
            )
    limit = tokens_limit(key)
    if limit is not None and allowances.room(limit) < 1:
        wait = allowances.refused(limit)
        raise _too_many(f"{key.tokens_per_minute} tokens a minute", key, wait)


def _too_many(what: str, key: ApiKey, wait_s: float) -> TooManyRequests:
    return TooManyRequests(
        f"API key {key.name!r} is over its {what}, over all nodes. Try again in {wait_s:.1f} s.",
        reason=TOKEN_LIMIT_EXCEEDED,
        retry_after_s=wait_s,
    )
