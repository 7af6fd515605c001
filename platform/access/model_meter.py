"""Sequences of each model that gateways have at work at once, within the model's limit."""

from __future__ import annotations

from collections import Counter

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.shared_counts import Count, Counts, OnlyOne
from loomserve.platform.access.shared_limits import model_limit
from loomserve.platform.base.errors import BadRequest, TooManyRequests

_RETRY_S = 1.0


class ModelMeter:
    """Open sequences by model, over all gateways; used on the event loop only."""

    def __init__(self, counts: Counts | None = None, allowances: Allowances | None = None) -> None:
        """
        Args:
            counts: what other front ends of the node have open; None: there is no other.
            allowances: what other nodes leave; None: there is no other.
        """
        self.open: Counter[str] = Counter()
        """By model, of this gateway."""
        self._counts = counts or OnlyOne()
        self._allowances = allowances

    def check(self, model: str, most: int, sequences: int) -> None:
        """Check that a model, of which there may be ``most``, takes so many more.

        Raises:
            BadRequest: it never does.
            TooManyRequests: it does not now.
        """
        if sequences > most:
            raise BadRequest(
                f"the request asks for {sequences} answers at once, and model {model!r} gives "
                f"{most}; ask for fewer",
                param="n",
            )
        there = self.open[model] + self._counts.running_elsewhere(_name(model))
        if there + sequences > most:
            raise _overloaded(model, f"already has {there} requests")
        if self._allowances is not None:
            limit = model_limit(_name(model), most)
            if self._allowances.room(limit) < sequences:
                self._allowances.refused(limit, sequences)
                raise _overloaded(model, f"has the {most} requests that it takes, over all nodes")

    def count(self, model: str, most: int, more: int) -> None:
        """Begin sequences, or end them."""
        self.open[model] += more
        self._counts.add(_name(model), Count.RUNNING, more)
        if self._allowances is None:
            return
        limit = model_limit(_name(model), most)
        if more > 0:
            self._allowances.use(limit, more)
        else:
            self._allowances.end(limit, -more)


def _name(model: str) -> str:
    return f"model {model}"


def _overloaded(model: str, why: str) -> TooManyRequests:
    return TooManyRequests(
        f"model {model!r} {why}; try again shortly",
        reason="model_overloaded",
        retry_after_s=_RETRY_S,
    )
