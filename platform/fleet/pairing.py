"""Which replicas lend to which where nobody has said so: cold ones to hot ones, by load. Pure.

A replica whose KV memory is nearly full, or so full that requests wait, borrows from one that has
had nothing to do, on another device of its node; both are in one pair at a time. A pair stays for
as long as the one needs it and the other can spare it, between bounds that lie apart, so that it
does not come and go.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

# Shares of its own KV memory that are in use. Where requests wait, the lower one makes it hot: the
# next may need all that is free.
_HOT, _STILL_HOT = 0.85, 0.5
_COLD, _STILL_COLD = 0.3, 0.7
_IDLE_S = 5.0


@dataclass(frozen=True)
class PairingReplica:
    """A replica that may lend and borrow, with the share of its own KV memory in use.

    Attributes:
        idle_s: Seconds for which it has had no request.
        requests_away: Its requests whose KV lies with its lender.
        may_lend: Whether it is awake and stays.
        fixed: Whether it takes part in loans of other kinds, and so in none of these.
    """

    id: str
    model: str
    device: str
    node: str
    usage: float
    waiting: int
    idle_s: float
    requests_away: int = 0
    may_lend: bool = True
    fixed: bool = False

    @property
    def is_hot(self) -> bool:
        return self.usage >= (_STILL_HOT if self.waiting else _HOT)

    @property
    def stays_hot(self) -> bool:
        return self.usage >= _STILL_HOT or self.requests_away > 0

    @property
    def is_cold(self) -> bool:
        return self.usage <= _COLD and self.idle_s >= _IDLE_S

    @property
    def stays_cold(self) -> bool:
        return self.usage <= _STILL_COLD


def paired(
    replicas: Sequence[PairingReplica],
    before: Mapping[str, str],
    off: Container[tuple[str, str]] = (),
) -> dict[str, str]:
    """The lender of each borrower, by their ids. ``before``: the pairs that there are; ``off``:
    borrowers' and lenders' models that an operator keeps apart."""
    by_id = {each.id: each for each in replicas if not each.fixed}
    pairs: dict[str, str] = {}
    for borrower_id, lender_id in sorted(before.items()):
        borrower, lender = by_id.get(borrower_id), by_id.get(lender_id)
        if borrower is None or lender is None or lender_id in pairs.values():
            continue
        suits = _suits(lender, borrower, off) and lender.stays_cold
        if suits and borrower.stays_hot and not {borrower_id, lender_id} & _all(pairs):
            pairs[borrower_id] = lender_id
    hot = [each for each in by_id.values() if each.is_hot]
    for borrower in sorted(hot, key=lambda each: (-each.waiting, -each.usage, each.id)):
        if borrower.id in _all(pairs):
            continue
        free = [
            each
            for each in by_id.values()
            if each.is_cold and each.id not in _all(pairs) and _suits(each, borrower, off)
        ]
        if free:
            coldest = min(free, key=lambda each: (each.usage, -each.idle_s, each.id))
            pairs[borrower.id] = coldest.id
    return pairs


def _all(pairs: Mapping[str, str]) -> set[str]:
    return {*pairs, *pairs.values()}


def _suits(
    lender: PairingReplica, borrower: PairingReplica, off: Container[tuple[str, str]]
) -> bool:
    # On one device, the borrower would wait for a lender whose core it holds.
    return (
        lender.may_lend
        and lender.node == borrower.node
        and lender.device != borrower.device
        and lender.model != borrower.model
        and (borrower.model, lender.model) not in off
    )
