"""Which models may borrow from which, and what that means for their engines.

Where nobody has said which, cold replicas lend to hot ones. A replica whose KV memory is nearly
full, or so full that requests wait, borrows from one that has had nothing to do, on another device
of its node; both are in one pair at a time. A pair stays for as long as the one needs it and the
other can spare it, between bounds that lie apart, so that it does not come and go.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import product

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Config, Model
from loomserve.platform.fleet.messages import LenderReplica
from loomserve.platform.fleet.registry import Registry
from loomserve.platform.fleet.snapshot import FleetModel, ReplicaRecord
from loomserve.platform.state.lending_options import LendingOptions

_EVERY_S = 1.0


def lenders_of(model: Model, models: Iterable[Model]) -> tuple[str, ...]:
    """The models among ``models`` from which ``model`` may borrow; none if it borrows nothing.

    A model that lends too borrows from itself only: its replicas compute shards of one another. One
    replica lends or borrows at a time, or its borrowers would wait while it waits for its lender.
    Where pairs are found from traffic, this says nothing.
    """
    wants = model.lending
    if wants is None or wants.borrow_memory is None:
        return ()
    if wants.among_replicas:
        return (model.name,)
    lend = [m.name for m in models if m.lending is not None and m.lending.lends_to_others]
    # In the user's order, who may have put the best one first.
    return tuple(name for name in wants.lenders or lend if name in lend)


def lending_options(model: Model, models: Iterable[Model]) -> LendingOptions | None:
    """Options of an engine of ``model``; None: it neither lends nor borrows. One replica of each
    lender's model lends to a borrower's, so it has as many lenders as there are such models."""
    given = model.lending
    if given is None:
        return None
    # Of the same name they are the same, but for the lenders, of which engines know the number.
    same = given.model_dump(include=LendingOptions.model_fields.keys() - {"lenders"})
    if given.auto:
        size = model.kv_cache_memory
        # Slices would have to be timed and packed at each start.
        return LendingOptions(borrow_bytes=size, lend_bytes=size, polling="operators", **same)
    return LendingOptions(
        borrow_bytes=given.borrow_memory or 0,
        lend_bytes=given.lend_memory or 0,
        lenders=max(1, len(given.lenders) or len(lenders_of(model, models))),
        **same,
    )


def check_reach(config: Config, node: str, apart: Mapping[tuple[int, int], str]) -> None:
    """Raises StartError, which names the field, if a GPU of ``node`` would borrow from one whose
    memory it does not reach: ``apart`` has such pairs, with the driver's word for why."""
    gpus = {each.name: each.gpu for each in config.devices if each.on == node}
    of = {each.name: each.devices for each in config.models}
    for index, model in enumerate(config.models):
        for lender in lenders_of(model, config.models):
            for device, other in product(model.devices, of[lender]):
                one, there = gpus.get(device), gpus.get(other)
                if one is not None and there is not None and (one, there) in apart:
                    raise StartError(
                        f"models[{index}].lending: model {model.name!r} on GPU {one} cannot borrow "
                        f"from {lender!r} on GPU {there}, whose memory it does not reach "
                        f"(nvidia-smi topo -p2p r: {apart[one, there]}): give them GPUs that say "
                        "OK there, or leave lending out"
                    )


class FoundPairs:
    """The pairs of replicas that traffic has made; those that have loans outlive a controller."""

    def __init__(self) -> None:
        self._lenders: dict[str, str] = {}
        self._found_at = float("-inf")

    def follow(self, registry: Registry, now: float, off: Container[tuple[str, str]]) -> None:
        """Find once a second who is hot and who is cold. ``off``: borrowers' and lenders' models
        that an operator keeps apart."""
        if now - self._found_at < _EVERY_S:
            return
        self._found_at = now
        models = [
            each
            for each in registry.snapshot(now).models
            if each.record.model.lending is not None and each.record.model.lending.auto
        ]
        there = {
            each.id: loan.lender_replica
            for model in models
            for each in model.replicas
            for loan in each.heartbeat.loans
        }
        self._lenders = paired(models, self._lenders | there, off)

    def lender_of(self, borrower: ReplicaRecord, registry: Registry) -> Iterator[LenderReplica]:
        """The replica from which this one borrows, if it is to."""
        lender = registry.find(self._lenders.get(borrower.id, ""))
        if lender is not None:
            yield LenderReplica(
                model=lender.model.name, id=lender.id, address=lender.heartbeat.address
            )

    def kept_apart(
        self, registry: Registry, off: Iterable[tuple[str, str]]
    ) -> set[tuple[str, str]]:
        """Borrower's and lender's model of the pairs that would be found but for an operator."""
        auto = {each.name for each in registry.models if each.lending and each.lending.auto}
        return {pair for pair in off if auto.issuperset(pair)}

    def models(self, registry: Registry) -> Iterator[tuple[str, str]]:
        for pair in self._lenders.items():
            one, other = map(registry.find, pair)
            if one is not None and other is not None:
                yield one.model.name, other.model.name


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
