"""Sequences that are at work at once, of API keys and of models, over all gateways."""

from __future__ import annotations

from collections import Counter

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.pools import Limit, LimitKind
from loomserve.platform.access.shared_counts import Count, Counts
from loomserve.platform.base.errors import BadRequest, TooManyRequests

_RETRY_S = 1.0


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
