"""Limits of API keys in units a minute: requests, or tokens.

A rate is a token bucket in the form of the generic cell rate algorithm (ITU-T I.371, annex A:
the virtual scheduling algorithm), which keeps one number, the time at which the bucket would be
full again, and so gives the exact time of the next admission. The bucket holds ten seconds' worth
of units: enough for a client's burst, and no minute sees more than 7/6 of the rate (or one unit
more, at rates below six a minute). Time is counted in whole parts of a nanosecond, since rounded
sums of intervals would refuse the last request of a burst.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.pools import Limit, LimitKind
from loomserve.platform.access.shared_counts import Count, Counts, of_key
from loomserve.platform.base.errors import TooManyRequests

_BURST_S = 10
_MINUTE_S = 60
_NS = 10**9
# What one more takes of a bucket, in nanoseconds times the rate a minute.
_INTERVAL = _MINUTE_S * _NS


def burst(rate: int) -> int:
    """Units that a key has at once after a pause: ten seconds' worth of its rate a minute."""
    return -(-rate * _BURST_S // _MINUTE_S)


@dataclass(slots=True)
class Bucket:
    """A token bucket; rates are units a minute, times seconds of the caller's clock."""

    full_at: int = 0
    """When it is full again, in nanoseconds times ``rate``: the interval between two is whole."""
    rate: int | None = None
    """By which ``full_at`` was counted; at another one the bucket is full."""

    def add(self, units: int, rate: int, now_s: float) -> None:
        """Take units, whether or not there are so many."""
        left = self._until_full(rate, now_s)
        self.full_at = int(now_s * _NS) * rate + left + units * _INTERVAL
        self.rate = rate

    def wait_s(self, rate: int, now_s: float) -> float:
        """Seconds until it has a unit; 0 or less: it has one."""
        return (self._until_full(rate, now_s) - (burst(rate) - 1) * _INTERVAL) / (rate * _NS)

    def left(self, rate: int, now_s: float) -> tuple[int, float]:
        """Units left, not below 0, and seconds until it is full again."""
        missing = self._until_full(rate, now_s)
        return max(0, burst(rate) - -(-missing // _INTERVAL)), missing / (rate * _NS)

    def _until_full(self, rate: int, now_s: float) -> int:
        return 0 if self.rate != rate else max(0, self.full_at - int(now_s * _NS) * rate)


class KeyRates:
    """One kind of rate of all API keys, over the gateways of this node and those of others. Keys
    are known by name: one that is changed or comes back goes on with what it has used."""

    def __init__(
        self,
        kind: LimitKind,
        count: Count,
        counts: Counts,
        allowances: Allowances | None,
        clock: Callable[[], float] = time.monotonic,
        reason: str | None = None,
    ) -> None:
        """``reason``: code of refusals; None: that of ``TooManyRequests``."""
        self._kind, self._count, self._reason = kind, count, reason
        self._counts, self._allowances, self._clock = counts, allowances, clock
        self._buckets: defaultdict[str, Bucket] = defaultdict(Bucket)

    def check(self, name: str, rate: int | None) -> None:
        """Raise TooManyRequests if the key has no unit left; exact on one node."""
        if rate is None:
            return
        wait_s = self._buckets[name].wait_s(rate, self._clock())
        if wait_s > 0:
            raise self._refusal(name, rate, "", wait_s)
        limit = self._limit(name, rate)
        if self._allowances is not None and self._allowances.room(limit) < 1:
            units = 1 if self._kind is LimitKind.REQUESTS else None
            wait_s = self._allowances.refused(limit, units)
            raise self._refusal(name, rate, ", over all nodes", wait_s)

    def add(self, name: str, rate: int | None, units: int) -> None:
        """Count units that a key has used in this gateway."""
        self._counts.add(of_key(name), self._count, units)
        if rate is not None:
            self._buckets[name].add(units, rate, self._clock())
            if self._allowances is not None:
                self._allowances.use(self._limit(name, rate), units)

    def take_news(self, name: str, rate: int | None) -> int:
        """Take over what other gateways of the node have counted; returns these units. A bucket
        fills from when it was taken of, so that news that come late keep a key waiting."""
        units = self._counts.news(of_key(name), self._count)
        if units and rate is not None:
            self._buckets[name].add(units, rate, self._clock())
        return units

    def left(self, name: str, rate: int) -> tuple[int, float]:
        """Units left of a key's bucket, and seconds until it is full again."""
        left, full_in_s = self._buckets[name].left(rate, self._clock())
        if self._allowances is not None:
            left = min(left, max(0, int(self._allowances.room(self._limit(name, rate)))))
        return left, full_in_s

    def _limit(self, name: str, rate: int) -> Limit:
        return Limit(of_key(name), self._kind, burst(rate), rate / _MINUTE_S)

    def _refusal(self, name: str, rate: int, where: str, wait_s: float) -> TooManyRequests:
        return TooManyRequests(
            f"API key {name!r} is over its {rate} {self._kind} a minute{where}. "
            f"Try again in {wait_s:.1f} s.",
            reason=self._reason,
            retry_after_s=wait_s,
        )
