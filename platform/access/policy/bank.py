"""All limits that hold over several gateways."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from loomserve.platform.access.policy.pools import EXCHANGE_S, GONE_S, LimitKind, Pool, Slice, Use

# Gateways say within so long what they have in hand.
_LEARNS_S = 3.0


@dataclass(frozen=True, slots=True)
class LimitReport:
    """What a gateway says every second."""

    gateway: str
    """Its id, another one after each start."""
    node: str
    """Where it runs: all gateways of a node count its day's tokens alike."""
    uses: tuple[Use, ...]
    """All limits of which it has used or has in hand any."""


@dataclass(frozen=True, slots=True)
class LimitAnswer:
    """What a gateway may use from then on."""

    slices: tuple[Slice, ...]
    """One for each of its uses, in their order."""
    gateways: int
    """How many share."""


class LimitBank:
    """The pools of all limits. It forgets them with its process, and gateways tell it anew."""

    def __init__(self, now: float) -> None:
        """``now``: seconds of the clock of all calls."""
        self._knows_from, self._looked_at = now + _LEARNS_S, now
        self._pools: dict[tuple[str, LimitKind], Pool] = {}
        self._seen: dict[str, float] = {}
        self._in: dict[str, frozenset[tuple[str, LimitKind]]] = {}

    def exchange(self, report: LimitReport, now: float) -> LimitAnswer:
        self._forget(now)
        self._seen[report.gateway] = now
        answers = tuple(self._exchanged(report, use, now) for use in report.uses)
        there = frozenset(_place(use) for use in report.uses)
        for place in self._in.get(report.gateway, frozenset()) - there:
            self._leave(report.gateway, place)
        self._in[report.gateway] = there
        return LimitAnswer(answers, len(self._seen))

    def leave(self, gateway: str) -> None:
        """A gateway has ended, with all that it had in hand."""
        for place in self._in.pop(gateway, frozenset()):
            self._leave(gateway, place)
        self._seen.pop(gateway, None)

    def keep_nodes(self, up: Collection[str]) -> None:
        """Take back what nodes that are not up have in hand of a day's tokens."""
        for (_, kind), pool in self._pools.items():
            if kind is LimitKind.DAY:
                pool.keep(up)

    def _exchanged(self, report: LimitReport, use: Use, now: float) -> Slice:
        place = _place(use)
        pool = self._pools.get(place)
        if pool is None:
            pool = self._pools[place] = Pool(use.limit, now, knows=now >= self._knows_from)
        by_node = use.limit.kind is LimitKind.DAY
        return pool.exchange(report.node if by_node else report.gateway, use, now)

    def _leave(self, gateway: str, place: tuple[str, LimitKind]) -> None:
        # A day's tokens are the node's, on which others may go on.
        if place in self._pools and place[1] is not LimitKind.DAY:
            self._pools[place].leave(gateway)

    def _forget(self, now: float) -> None:
        if now - self._looked_at < EXCHANGE_S:
            return
        self._looked_at = now
        for gateway, seen_at in list(self._seen.items()):
            if now - seen_at > GONE_S:
                del self._seen[gateway]
                self._in.pop(gateway, None)
        over = [place for place, pool in self._pools.items() if pool.is_over(now)]
        for place in over:
            del self._pools[place]


def _place(use: Use) -> tuple[str, LimitKind]:
    return use.limit.name, use.limit.kind
