"""Admits requests of API keys within their limits, over all gateways of a platform.

Those of one node count together; those of several share what the controller divides. A request is
one sequence until it is read, for it may have several prompts and several answers to each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.pools import LimitKind
from loomserve.platform.access.rates import KeyRates
from loomserve.platform.access.sequences import Sequences
from loomserve.platform.access.shared_counts import Count, Counts, of_key
from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey

# Nobody knows when a running request ends; most last seconds.
_RETRY_S = 1.0


class RequestMeter:
    """Requests of each API key; used on the event loop only."""

    def __init__(
        self,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        allowances: Allowances | None = None,
    ) -> None:
        """``counts``: of other gateways of this node; ``allowances``: of other nodes."""
        counts = counts or Counts()
        self._rates = KeyRates(LimitKind.REQUESTS, Count.REQUESTS, counts, allowances, clock)
        self._sequences = Sequences(counts, allowances)

    def acquire(self, key: ApiKey) -> None:
        """Admit a request with one sequence, or raise TooManyRequests."""
        self.look([key])
        most = key.max_concurrent
        if most is not None and (running := self._sequences.on_node(of_key(key.name))) >= most:
            raise _too_many(
                f"API key {key.name!r} has {running} requests running, its limit. "
                "Wait until one has ended."
            )
        self._check_elsewhere(key, 1)
        self._rates.check(key.name, key.requests_per_minute)
        self._rates.add(key.name, key.requests_per_minute, 1)
        self._sequences.add(of_key(key.name), most, 1)

    def acquire_more(self, key: ApiKey, more: int) -> None:
        """Admit ``more`` sequences of a request that was admitted with one. Raises BadRequest if
        the request has more sequences than the key may have at all; TooManyRequests if the key is
        over its limit now."""
        running, most = self._sequences.on_node(of_key(key.name)), key.max_concurrent
        if most is not None and 1 + more > most:
            raise BadRequest(
                f"The request asks for {1 + more} answers at once, and API key {key.name!r} may "
                f"have {most}. Ask for fewer.",
                param="n",
            )
        if most is not None and running + more > most:
            raise _too_many(
                f"API key {key.name!r} has {running - 1} answers running and may have "
                f"{most}, and the request asks for {1 + more}. Wait until others end."
            )
        self._check_elsewhere(key, more)
        self._sequences.add(of_key(key.name), most, more)

    def release(self, key: ApiKey, sequences: int) -> None:
        """End a request that was admitted with so many sequences in all."""
        self._sequences.add(of_key(key.name), key.max_concurrent, -sequences)

    def look(self, keys: Iterable[ApiKey]) -> None:
        """Take over what other gateways have admitted; to be called every ``POLL_INTERVAL_S``."""
        for key in keys:
            self._rates.take_news(key.name, key.requests_per_minute)

    def _check_elsewhere(self, key: ApiKey, more: int) -> None:
        if key.max_concurrent is None:
            return
        wait_s = self._sequences.refused(of_key(key.name), key.max_concurrent, more)
        if wait_s is not None:
            raise _too_many(
                f"API key {key.name!r} has the sequences running that it may have, "
                f"{key.max_concurrent} over all nodes. Wait until some have ended.",
                wait_s,
            )


def _too_many(message: str, retry_after_s: float = _RETRY_S) -> TooManyRequests:
    return TooManyRequests(
        message, reason="concurrency_limit_exceeded", retry_after_s=retry_after_s
    )
