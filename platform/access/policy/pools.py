"""A limit that holds over several gateways: what is left of it, and who may use how much of that.

Each gateway has some units in hand, which it uses without asking. Every second it says what it has
used, has in hand and would like to have, and is told what it has from then on. What all have in
hand is never more than what is left; only where an answer is lost that takes units away, they may
be used twice until the next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

EXCHANGE_S = 1.0
"""How often a gateway asks."""
SILENT_S = 2.5
"""Without an answer for so long, a gateway goes on with its part of the rate."""
GONE_S = 10.0
"""Who has said nothing for so long has nothing in hand any more, but of a day's tokens."""
# So long a pool that knows of nobody gives nothing: others may have all of it in hand.
_LEARNS_S = 3.0
_TURN_S = 2.0
# A demand that has fallen so far, by half each second, is none.
_FORGOTTEN = 0.01
_DAY_S = 86_400.0
# Of seats that nobody asks for, a part is kept for a gateway of which nothing has been heard.
_NEWCOMER = {"": 0.0}


class LimitKind(StrEnum):
    REQUESTS = "requests"
    """Requests a minute, in a token bucket."""
    TOKENS = "tokens"
    """Tokens a minute, likewise, taken once they are known."""
    DAY = "day"
    """Tokens of one day; they do not come back."""
    RUNNING = "running"
    """Sequences at once; they come back when they end."""

    @property
    def comes_back(self) -> bool:
        """Whether it does so by itself, at a rate."""
        return self in (LimitKind.REQUESTS, LimitKind.TOKENS)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit over all gateways."""

    name: str
    """Of the key or the model; of a day's tokens with the day."""
    kind: LimitKind
    most: float
    """Units at once."""
    per_s: float = 0.0
    """Units that come back each second."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a gateway says of its use of a limit."""

    limit: Limit
    used: float
    """Units used: of a rate since the last answer, else of the day or at present."""
    in_hand: float
    """Units that it may use; less than 0: it has used more than it had, or owes seats."""
    wanted: float
    """Units that it would have used, lately, in the time between two answers."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a gateway may use of a limit."""

    more: float
    """Units that come into its hand; less than 0: that leave it."""
    per_s: float
    """Units that come into its hand each second while nobody answers."""
    left: float
    """Units that nobody has used."""
    known: bool = True
    """False: it is not known yet who has what, and all go on as they did."""


@dataclass(slots=True)
class _Member:
    used: float
    in_hand: float
    wanted: float
    per_s: float
    seen_at: float

    def may_use(self, now: float) -> float:
        """Units that it has in hand at most, as long as it says nothing."""
        alone_s = now - self.seen_at - SILENT_S
        return max(0.0, self.in_hand) + self.per_s * max(0.0, alone_s)

    def is_due(self, now: float) -> float:
        """Units of its part of the rate that have come since it was told what it has."""
        short = max(0.0, self.wanted - self.in_hand)
        return min(short, self.per_s * (now - self.seen_at))


class Pool:
    """One limit and the gateways that use it; times are seconds of one clock."""

    def __init__(self, limit: Limit, now: float, *, knows: bool) -> None:
        """``knows``: that no gateway has used it lately, as far as it is not told."""
        self._limit = limit
        self._gives_from = now if knows else now + _LEARNS_S
        self._left, self._at = limit.most if knows else 0.0, now
        self._members: dict[str, _Member] = {}

    def exchange(self, member: str, use: Use, now: float) -> Slice:
        """Take in what a gateway says; returns what it may use."""
        self._limit = use.limit
        self._forget(now)
        before = self._members.get(member)
        told_per_s = before.per_s if before is not None else 0.0
        mine = _Member(use.used, use.in_hand, use.wanted, told_per_s, now)
        self._members[member] = mine
        if before is None and now < self._gives_from:
            # It has it of a pool that was forgotten.
            self._left += max(0.0, use.in_hand)
        left = self._left_now(use, now)
        others = [each for name, each in self._members.items() if name != member]
        due = mine.per_s * (now - before.seen_at) if before is not None else 0.0
        mine.per_s = self._part_of_rate(member, others)
        if now < self._gives_from:
            return Slice(0.0, mine.per_s, left, known=False)
        free = left - sum(each.may_use(now) for each in others)
        if self._limit.kind is LimitKind.RUNNING:
            # One that has too many gives them back as they become free.
            part = self._seats(member, now) - use.used
            mine.in_hand = min(part, max(0.0, free))
        else:
            # Nobody gets what is another's because it happens to ask first.
            free -= sum(each.is_due(now) for each in others)
            demands = {name: each.wanted for name, each in self._members.items()}
            # A whole unit may take long to gather, and is of no use in parts.
            wanted = max(use.wanted, 1.0) if use.wanted > _FORGOTTEN else 0.0
            gathered = min(wanted, due + min(1.0, use.in_hand))
            part = max(slices(demands, left)[member], gathered)
            mine.in_hand = max(0.0, min(part, free))
        return Slice(mine.in_hand - use.in_hand, mine.per_s, left)

    def leave(self, member: str) -> None:
        """A gateway uses it no more, and has nothing in hand."""
        if self._limit.kind is not LimitKind.DAY:
            self._members.pop(member, None)
        elif member in self._members:
            one = self._members[member]
            one.in_hand = one.wanted = 0.0

    def keep(self, members: Collection[str]) -> None:
        """Take back what others have in hand: they are gone for certain."""
        for name in self._members.keys() - set(members):
            self.leave(name)

    def is_over(self, now: float) -> bool:
        """Whether nothing has to be remembered of it."""
        if self._limit.kind is LimitKind.DAY:
            return all(now - each.seen_at > _DAY_S for each in self._members.values())
        self._forget(now)
        if self._members:
            return False
        return self._left + self._limit.per_s * (now - self._at) >= self._limit.most or (
            not self._limit.kind.comes_back
        )

    def _left_now(self, use: Use, now: float) -> float:
        if not self._limit.kind.comes_back:
            return self._limit.most - sum(each.used for each in self._members.values())
        back = self._limit.per_s * (now - self._at)
        self._left = min(self._limit.most, self._left + back) - use.used
        self._at = now
        return self._left

    def _seats(self, member: str, now: float) -> int:
        demands = {name: each.used + each.wanted for name, each in self._members.items()}
        demands |= _NEWCOMER
        return whole_slices(demands, int(self._limit.most), int(now / _TURN_S))[member]

    def _part_of_rate(self, member: str, others: list[_Member]) -> float:
        rate = self._limit.per_s
        if not rate:
            return 0.0
        demands = {name: each.wanted for name, each in self._members.items()}
        there = max(0.0, rate - sum(each.per_s for each in others))
        return min(slices(demands, rate)[member], there)

    def _forget(self, now: float) -> None:
        for name, each in list(self._members.items()):
            # One that is cut off goes on with a day's tokens, which do not come back: they are its
            # own for as long as its node may be up.
            if now - each.seen_at > GONE_S and self._limit.kind is not LimitKind.DAY:
                # It may have used all that it had of a rate.
                self._left -= max(0.0, each.in_hand)
                self.leave(name)


def slices(demands: Mapping[str, float], limit: float) -> dict[str, float]:
    """Divide a limit by demand, max-min fair; the sum is the limit. Nobody gets less than its
    demand while another gets more than an equal part. What nobody asks for is divided evenly, so
    that the next one to ask has some."""
    given, left, asking = dict[str, float](), max(0.0, limit), len(demands)
    for name, demand in sorted(demands.items(), key=lambda each: (each[1], each[0])):
        given[name] = min(max(0.0, demand), left / asking)
        left -= given[name]
        asking -= 1
    return {name: part + left / len(demands) for name, part in given.items()}


def whole_slices(demands: Mapping[str, float], limit: int, turn: int) -> dict[str, int]:
    """Integer division by demand; the remainder rotates with the turns."""
    parts = slices(demands, limit)
    whole = {name: math.floor(part) for name, part in parts.items()}
    odd = max(0, limit) - sum(whole.values())
    names = sorted(parts)

    def first(name: str) -> tuple[bool, int]:
        waits = demands[name] > whole[name]
        return not waits, (names.index(name) + turn) % len(names)

    for name in sorted(names, key=first)[:odd]:
        whole[name] += 1
    return whole
