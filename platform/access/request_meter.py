"""Admits requests of API keys within their limits, over all front ends of a platform.

Those of one node count together; those of several share what the controller divides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from loomserve.platform.access import limits
from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.shared_counts import Count, Counts, OnlyOne, of_key
from loomserve.platform.access.shared_limits import (
    check_requests,
    check_running,
    requests_limit,
    running_limit,
)
from loomserve.platform.config import ApiKey


class RequestMeter:
    """Requests of each API key; used on the event loop only."""

    def __init__(
        self,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        allowances: Allowances | None = None,
    ) -> None:
        """
        Args:
            counts: what other front ends of the node count; None: there is no other.
            clock: seconds, for the keys' rates.
            allowances: what other nodes leave; None: there is no other.
        """
        self._allowances = allowances
        self._counts = counts or OnlyOne()
        self._clock = clock
        # By name: a key that is changed or comes back goes on with what it has used.
        self._usage: dict[str, limits.KeyUsage] = {}

    def acquire(self, key: ApiKey) -> None:
        """Admit a request with one sequence, to be released.

        Raises:
            TooManyRequests: the key is over a limit.
        """
        usage = self._of(key)
        running = self._elsewhere(key)
        after = limits.acquire(key, usage, self._clock(), running_elsewhere=running)
        if self._allowances is not None:
            check_requests(self._allowances, key)
            if (limit := requests_limit(key)) is not None:
                self._allowances.use(limit, 1)
        self._usage[key.name] = after
        self._count(key, Count.REQUESTS, 1)
        self._count(key, Count.RUNNING, 1)

    def acquire_more(self, key: ApiKey, more: int) -> None:
        """Admit ``more`` sequences of a request that was admitted with one.

        Raises:
            BadRequest: the request has more sequences than the key may have at all.
            TooManyRequests: the key is over its limit now.
        """
        after = limits.acquire_more(
            key, self._usage[key.name], more, running_elsewhere=self._elsewhere(key)
        )
        if self._allowances is not None:
            check_running(self._allowances, key, more)
        self._usage[key.name] = after
        self._count(key, Count.RUNNING, more)

    def release(self, key: ApiKey, sequences: int) -> None:
        """End a request that was admitted with so many sequences in all."""
        self._usage[key.name] = limits.release(self._usage[key.name], sequences)
        self._count(key, Count.RUNNING, -sequences)

    def look(self, keys: Iterable[ApiKey]) -> None:
        """Take over what other front ends have admitted; to be called every ``LOOK_S``.

        A bucket fills from when it was taken of, so that news that come late keep a key waiting.
        """
        for key in keys:
            self._of(key)

    def _of(self, key: ApiKey) -> limits.KeyUsage:
        usage = self._usage.get(key.name, limits.KeyUsage())
        news = self._counts.news(of_key(key.name), Count.REQUESTS)
        if news:
            usage = limits.admitted_elsewhere(key, usage, news, self._clock())
            self._usage[key.name] = usage
        return usage

    def _elsewhere(self, key: ApiKey) -> int:
        return (
            self._counts.running_elsewhere(of_key(key.name))
            if key.max_concurrent is not None
            else 0
        )

    def _count(self, key: ApiKey, count: Count, more: int) -> None:
        self._counts.add(of_key(key.name), count, more)
        limit = running_limit(key) if count is Count.RUNNING else None
        if self._allowances is None or limit is None:
            return
        if more > 0:
            self._allowances.use(limit, more)
        else:
            self._allowances.end(limit, -more)
