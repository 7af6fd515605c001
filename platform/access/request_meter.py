"""Admits requests of API keys, and sequences at once, within limits over all gateways."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.pools import Limit, LimitKind
from loomserve.platform.access.rates import KeyRates
from loomserve.platform.access.shared_counts import Count, Counts, of_key
from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey


class Sequences:
    """Open sequences by name, within limits over the gateways of this node and of others."""

    def __init__(self, counts: Counts | None = None, allowances: Allowances | None = None) -> None:
        self.open: Counter[str] = Counter()
        """Of this gateway."""
        self._counts = counts or Counts()
        self._allowances = allowances

    def on_node(self, name: str) -> int:
        return self.open[name] + self._counts.running_elsewhere(name)

    def refused(self, name: str, most: int, more: int) -> float | None:
        """Seconds until other nodes may leave room for so many more; None: they do now."""
        if self._allowances is None:
            return None
        limit = Limit(name, LimitKind.RUNNING, most)
        fits = self._allowances.room(limit) >= more
        return None if fits else self._allowances.refused(limit, more)

    def add(self, name: str, most: int | None, more: int) -> None:
        """Begin sequences, or end them (less than 0); ValueError: so many are not running."""
        if self.open[name] + more < 0:
            raise ValueError("release without a running request")
        self.open[name] += more
        self._counts.add(name, Count.RUNNING, more)
        if self._allowances is None or most is None:
            return
        limit = Limit(name, LimitKind.RUNNING, most)
        if more > 0:
            self._allowances.use(limit, more)
        else:
            self._allowances.end(limit, -more)


class ModelMeter:
    """Sequences of each model within the model's limit; used on the event loop only."""

    def __init__(self, counts: Counts | None = None, allowances: Allowances | None = None) -> None:
        self._sequences = Sequences(counts, allowances)

    @property
    def total(self) -> int:
        """All that this gateway has open."""
        return self._sequences.open.total()

    def check(self, model: str, most: int, sequences: int) -> None:
        """Check that a model, of which there may be ``most``, takes so many more. Raises BadRequest
        if it never does; TooManyRequests if it does not now."""
        if sequences > most:
            raise BadRequest(
                f"the request asks for {sequences} answers at once, and model {model!r} gives "
                f"{most}; ask for fewer",
                param="n",
            )
        there = self._sequences.on_node(_name(model))
        if there + sequences > most:
            raise _overloaded(model, f"already has {there} requests")
        if self._sequences.refused(_name(model), most, sequences) is not None:
            raise _overloaded(model, f"has the {most} requests that it takes, over all nodes")

    def count(self, model: str, most: int, more: int) -> None:
        self._sequences.add(_name(model), most, more)


def _name(model: str) -> str:
    return f"model {model}"


def _overloaded(model: str, why: str) -> TooManyRequests:
    return TooManyRequests(
        f"model {model!r} {why}; try again shortly",
        reason="model_overloaded",
        retry_after_s=_RETRY_S,
    )


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
