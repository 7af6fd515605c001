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
from typing import Protocol

from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey

_BURST_S = 10
_NS = 10**9
INTERVAL = 60 * _NS
"""What one more takes of a bucket, in nanoseconds times the rate a minute."""
# Nobody knows when a running request ends; most last seconds.
_RETRY_CONCURRENCY_S = 1.0


def burst(rate: int) -> int:
    """Requests, or tokens, that a key has at once after a pause: ten seconds' worth of its rate."""
    return -(-rate * _BURST_S // 60)


class Bucket(Protocol):
    """What is known of a token bucket."""

    @property
    def full_at(self) -> int | None:
        """When it is full again: nanoseconds of the caller's clock times ``rate``, of which the
        interval between two is a whole number. None before the first."""

    @property
    def rate(self) -> int | None:
        """The rate a minute that ``full_at`` was counted by; at another one it is full again."""


def until_full(bucket: Bucket, rate: int, now_s: float) -> int:
    """How long until the bucket is full: nanoseconds times ``rate``, a minute; 0: it is."""
    if bucket.full_at is None or bucket.rate != rate:
        return 0
    return max(0, bucket.full_at - int(now_s * _NS) * rate)


def wait_s(bucket: Bucket, rate: int, now_s: float) -> float:
    """Seconds until one more fits into the bucket; 0 or less: it does."""
    return seconds(until_full(bucket, rate, now_s) - (burst(rate) - 1) * INTERVAL, rate)


def filled(bucket: Bucket, rate: int, now_s: float, more: int) -> int:
    """The bucket's ``full_at`` with ``more`` in it."""
    return int(now_s * _NS) * rate + until_full(bucket, rate, now_s) + more * INTERVAL


def seconds(span: int, rate: int) -> float:
    """Seconds of a span that is counted in nanoseconds times ``rate``."""
    return span / (rate * _NS)


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """Usage of one API key at present.

    ``full_at`` is of all front ends' requests, ``running`` of one front end's own.
    """

    full_at: int | None = None
    """Of the :class:`Bucket` of requests."""
    running: int = 0
    """Sequences of requests that were admitted and have not ended."""
    rate: int | None = None
    """Of the same."""


def acquire(key: ApiKey, usage: KeyUsage, now_s: float, *, running_elsewhere: int = 0) -> KeyUsage:
    """Admit a request at ``now_s``, and return the key's usage with it.

    ``running_elsewhere``: sequences that other front ends have running.

    Raises:
        TooManyRequests: the key is over a limit; ``retry_after_s`` is exact for the rate.
    """
    running = usage.running + running_elsewhere
    if key.max_concurrent is not None and running >= key.max_concurrent:
        raise TooManyRequests(
            f"API key {key.name!r} has {running} requests running, its limit. "
            "Wait until one has ended.",
            reason="concurrency_limit_exceeded",
            retry_after_s=_RETRY_CONCURRENCY_S,
        )
    if key.requests_per_minute is None:
        return replace(usage, running=usage.running + 1)
    rate = key.requests_per_minute
    wait = wait_s(usage, rate, now_s)
    if wait > 0:
        raise TooManyRequests(
            f"API key {key.name!r} is over its {rate} requests a minute. "
            f"Try again in {wait:.1f} s.",
            retry_after_s=wait,
        )
    full_at = filled(usage, rate, now_s, 1)
    return KeyUsage(full_at=full_at, running=usage.running + 1, rate=rate)


def admitted_elsewhere(key: ApiKey, usage: KeyUsage, requests: int, now_s: float) -> KeyUsage:
    """The key's usage with requests that other front ends have admitted."""
    rate = key.requests_per_minute
    if rate is None:
        return usage
    return replace(usage, full_at=filled(usage, rate, now_s, requests), rate=rate)


def acquire_more(
    key: ApiKey, usage: KeyUsage, more: int, *, running_elsewhere: int = 0
) -> KeyUsage:
    """Admit ``more`` sequences of a request that was admitted with one, before it was read.

    ``running_elsewhere``: as for :func:`acquire`.

    Raises:
        BadRequest: the request has more sequences than the key may have at all.
        TooManyRequests: the key is over its limit now.
    """
    running = usage.running + running_elsewhere
    if key.max_concurrent is not None and running + more > key.max_concurrent:
        if 1 + more > key.max_concurrent:
            raise BadRequest(
                f"The request asks for {1 + more} answers at once, and API key {key.name!r} may "
                f"have {key.max_concurrent}. Ask for fewer.",
                param="n",
            )
        raise TooManyRequests(
            f"API key {key.name!r} has {running - 1} answers running and may have "
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
