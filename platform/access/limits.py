"""Limits of one API key: requests a minute, and sequences at once.

A request is one sequence until it is read, for it may have several prompts and several answers to
each.

The rate is a token bucket in the form of the generic cell rate algorithm (ITU-T I.371, annex A:
the virtual scheduling algorithm), which keeps one number, the time at which the bucket would be
full again, and so gives the exact time of the next admission. The bucket holds ten seconds' worth
of requests: enough for a client's burst, and no minute sees more than 7/6 of the rate (or one
request more, at rates below six a minute). Time is counted in whole parts of a nanosecond, since
rounded sums of intervals would refuse the last request of a burst.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey

_BURST_S = 10
_NS = 10**9
# Nobody knows when a running request ends; most last seconds.
_RETRY_CONCURRENCY_S = 1.0


def burst(requests_per_minute: int) -> int:
    """Requests that a key may send at once after a pause: ten seconds' worth of its rate."""
    return -(-requests_per_minute * _BURST_S // 60)


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """Usage of one API key at present. Each gateway process counts its own."""

    full_at: int | None = None
    """When the bucket is full again: nanoseconds of the caller's clock times the key's rate, of
    which the interval between two requests is a whole number. None before the first request."""
    running: int = 0
    """Sequences of requests that were admitted and have not ended."""
    rate: int | None = None
    """The rate that ``full_at`` was counted by; at another one the bucket is full again."""


def acquire(key: ApiKey, usage: KeyUsage, now_s: float) -> KeyUsage:
    """Admit a request at ``now_s``, and return the key's usage with it.

    Raises:
        TooManyRequests: the key is over a limit; ``retry_after_s`` is exact for the rate.
    """
    if key.max_concurrent is not None and usage.running >= key.max_concurrent:
        raise TooManyRequests(
            f"API key {key.name!r} has {usage.running} requests running, its limit. "
            "Wait until one has ended.",
            reason="concurrency_limit_exceeded",
            retry_after_s=_RETRY_CONCURRENCY_S,
        )
    if key.requests_per_minute is None:
        return replace(usage, running=usage.running + 1)
    rate = key.requests_per_minute
    interval = 60 * _NS
    now = int(now_s * _NS) * rate
    known = usage.full_at if usage.rate == rate else None
    full_at = now if known is None else max(known, now)
    wait = full_at - now - (burst(rate) - 1) * interval
    if wait > 0:
        wait_s = wait / (rate * _NS)
        raise TooManyRequests(
            f"API key {key.name!r} is over its {rate} requests a minute. "
            f"Try again in {wait_s:.1f} s.",
            retry_after_s=wait_s,
        )
    return KeyUsage(full_at=full_at + interval, running=usage.running + 1, rate=rate)


def acquire_more(key: ApiKey, usage: KeyUsage, more: int) -> KeyUsage:
    """Admit ``more`` sequences of a request that was admitted with one, before it was read.

    Raises:
        BadRequest: the request has more sequences than the key may have at all.
        TooManyRequests: the key is over its limit now.
    """
    if key.max_concurrent is not None and usage.running + more > key.max_concurrent:
        if 1 + more > key.max_concurrent:
            raise BadRequest(
                f"The request asks for {1 + more} answers at once, and API key {key.name!r} may "
                f"have {key.max_concurrent}. Ask for fewer.",
                param="n",
            )
        raise TooManyRequests(
            f"API key {key.name!r} has {usage.running - 1} answers running and may have "
            f"{key.max_concurrent}, and the request asks for {1 + more}. Wait until others end.",
            reason="concurrency_limit_exceeded",
            retry_after_s=_RETRY_CONCURRENCY_S,
        )
    return replace(usage, running=usage.running + more)


def release(usage: KeyUsage, sequences: int = 1) -> KeyUsage:
    """End an admitted request, and return the key's usage without it.

    Raises:
        ValueError: so many sequences are not running; a request was released twice.
    """
    if usage.running < sequences:
        raise ValueError("release without a running request")
    return replace(usage, running=usage.running - sequences)
