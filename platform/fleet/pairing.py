"""Which replicas lend to which where nobody has said so: cold ones to hot ones, by load. Pure.

A replica whose KV memory is nearly full, or so full that requests wait, borrows from one that has
had nothing to do, on another device of its node; both are in one pair at a time. A pair stays for
as long as the one needs it and the other can spare it, between bounds that lie apart, so that it
does not come and go.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from loomserve.platform.fleet.snapshot import FleetModel, ReplicaRecord

# Shares of its own KV memory that are in use. Where requests wait, the lower one makes it hot: the
# next may need all that is free.
_HOT, _STILL_HOT = 0.85, 0.5
_COLD, _STILL_COLD = 0.3, 0.7
_IDLE_S = 5.0


def paired(
    models: Iterable[FleetModel], before: Mapping[str, str], off: Container[tuple[str, str]] = ()
) -> dict[str, str]:
    """The lender of each borrower among the replicas of these models, by their ids. ``before``: the
    pairs that there are; ``off``: borrowers' and lenders' models that an operator keeps apart."""
    models = tuple(models)
    by_id = {each.id: each for model in models for each in model.replicas}
    stay = {model.name for model in models if model.record.stays}

    def suits(lender: ReplicaRecord, borrower: ReplicaRecord) -> bool:
        return (
            lender.model.name in stay
            and lender.may_lend_to(borrower)
            and lender.model.name != borrower.model.name
            and (borrower.model.name, lender.model.name) not in off
        )

    pairs: dict[str, str] = {}
    for borrower_id, lender_id in sorted(before.items()):
        borrower, lender = by_id.get(borrower_id), by_id.get(lender_id)
        if borrower is None or lender is None or lender_id in pairs.values():
            continue
        stays = lender.own_kv_share <= _STILL_COLD and _stays_hot(borrower)
        if stays and suits(lender, borrower) and not {borrower_id, lender_id} & _all(pairs):
            pairs[borrower_id] = lender_id
    hot = [each for each in by_id.values() if _is_hot(each)]
    for borrower in sorted(hot, key=lambda each: (-each.waiting, -each.own_kv_share, each.id)):
        if borrower.id in _all(pairs):
            continue
        free = [
            each
            for each in by_id.values()
            if _is_cold(each) and each.id not in _all(pairs) and suits(each, borrower)
        ]
        if free:
            coldest = min(free, key=lambda each: (each.own_kv_share, -_rested_s(each), each.id))
            pairs[borrower.id] = coldest.id
    return pairs


def _all(pairs: Mapping[str, str]) -> set[str]:
    return {*pairs, *pairs.values()}


def _is_hot(replica: ReplicaRecord) -> bool:
    return replica.own_kv_share >= (_STILL_HOT if replica.waiting else _HOT)


def _stays_hot(replica: ReplicaRecord) -> bool:
    """Whether it needs its lender still, or has requests there."""
    away = any(loan.requests for loan in replica.heartbeat.loans)
    return away or replica.own_kv_share >= _STILL_HOT


def _is_cold(replica: ReplicaRecord) -> bool:
    return replica.own_kv_share <= _COLD and _rested_s(replica) >= _IDLE_S


def _rested_s(replica: ReplicaRecord) -> float:
    """For how long it had had no request as it was measured."""
    return replica.load.idle_s if replica.load is not None else 0.0
