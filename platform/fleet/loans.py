"""Which replicas lend to which: pairs that operators allow, loans that they want, loans that are.

A wanted loan belongs to a place, which is a model on a device: whichever replica is there is told
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from loomserve.platform.base.errors import NotFound
from loomserve.platform.fleet.lending_pairs import FoundPairs, lenders_of
from loomserve.platform.fleet.messages import Heartbeat, LenderReplica
from loomserve.platform.fleet.registry import Registry
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.state import (
    LendingModelState,
    LendingPairState,
    LendingState,
    LoanState,
    Presence,
)
from loomserve.platform.state.lending_options import ShardSpec

Place = tuple[str, str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DesiredShard:
    """Shard of a replica that a lender's model computes on ``device``; None: on any device."""

    shard: ShardSpec
    device: str | None = None


@dataclass
class DesiredLoans:
    """Wishes that outlive replicas; a pair is a borrower's and a lender's model."""

    draining: set[str] = field(default_factory=set)
    """Names of loans that end once their requests have finished or left."""
    pairs_off: set[tuple[str, str]] = field(default_factory=set)
    """Pairs that an operator has switched off."""
    _limits: dict[Place, dict[str, int]] = field(default_factory=dict)
    _shards: dict[Place, dict[str, DesiredShard]] = field(default_factory=dict)

    def recover(self, report: Heartbeat) -> None:
        """Take over what an earlier controller told a replica."""
        said, place = report.borrowing, place_of(report)
        if said is None:
            return
        self._limits[place] = said.limits | self._limits.get(place, {})
        told = {lender: DesiredShard(shard) for lender, shard in said.shards.items()}
        self._shards.setdefault(place, told)

    def observe(self, before: Heartbeat, now: Heartbeat) -> None:
        """Between two heartbeats of a replica, leave a shard at home that came home by itself: its
        lender was slow, needed its memory or died, which a planner has to see first."""
        for lender in _with_shards(before) - _with_shards(now):
            self._shards.get(place_of(now), {}).pop(lender, None)

    def is_off(self, borrower: str, lender: str) -> bool:
        return (borrower, lender) in self.pairs_off

    def switch(self, borrower: str, lender: str, enabled: bool) -> None:
        """Switch a pair; one that is enabled loses the limits that plans have set."""
        if not enabled:
            self.pairs_off.add((borrower, lender))
            return
        self.pairs_off.discard((borrower, lender))
        for (model, _), limits in self._limits.items():
            if model == borrower:
                limits.pop(lender, None)

    def limit(self, place: Place, lender: str, most_bytes: int | None) -> None:
        """Limit the KV with a lender's model; None: the borrower decides."""
        _tell(self._limits, place, lender, most_bytes)

    def move_shard(self, place: Place, lender: str, desired: DesiredShard | None) -> None:
        """Have a lender's model compute a shard; None: have it come home."""
        _tell(self._shards, place, lender, desired)

    def limits(self, place: Place) -> dict[str, int]:
        """Bytes by the lender's model."""
        return dict(self._limits.get(place, {}))

    def shards(self, place: Place) -> dict[str, ShardSpec]:
        """By the lender's model."""
        return {lender: desired.shard for lender, desired in self._shards.get(place, {}).items()}

    def device_of(self, place: Place, lender: str) -> str | None:
        """The device on which a lender's model computes the shard; None: any."""
        desired = self._shards.get(place, {}).get(lender)
        return desired.device if desired else None

    def limits_of_pair(self, borrower: str, lender: str) -> dict[str, int]:
        """Bytes by the borrower's device."""
        return {
            device: limits[lender]
            for (model, device), limits in self._limits.items()
            if model == borrower and lender in limits
        }


def _with_shards(report: Heartbeat) -> set[str]:
    """Models that compute a shard of the replica."""
    return {loan.lender for loan in report.loans if loan.shard is not None and loan.shard.is_away}


def place_of(report: Heartbeat) -> Place:
    return report.model.name, report.device


def _tell(of: dict[Place, dict[str, _T]], place: Place, lender: str, what: _T | None) -> None:
    told = of.setdefault(place, {})
    if what is None:
        told.pop(lender, None)
    else:
        told[lender] = what


@dataclass
class FleetLoans:
    """The desired loans of a registry's replicas; a pair is a borrower's and a lender's model."""

    registry: Registry
    desired: DesiredLoans = field(default_factory=DesiredLoans)
    found: FoundPairs = field(default_factory=FoundPairs)

    # What operators and plans change

    def set_pair(self, pair: str, enabled: bool) -> None:
        """Let a model borrow from another, without plans' limits, or end what it has borrowed.
        ``pair`` is ``borrower/lender``. Raises NotFound if one may not borrow from the other by the
        configuration."""
        known = {f"{borrower}/{lender}": (borrower, lender) for borrower, lender in self._pairs()}
        if pair not in known:
            names = ", ".join(sorted(known)) or "none"
            raise NotFound(f"there is no pair {pair!r} of borrower/lender; the pairs are: {names}")
        self.desired.switch(*known[pair], enabled)

    def drain(self, name: str, now: float) -> None:
        """End a loan once nothing lies there. Raises NotFound if no live replica has borrowed under
        that name."""
        known = {loan.name for loan in self._loans(now)}
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise NotFound(f"there is no loan {name!r}; the loans are: {names}")
        # Names of loans that have ended meanwhile are of no use any more.
        self.desired.draining = self.desired.draining & known | {name}

    def limit(self, replica_id: str, lender: str, most_bytes: int | None) -> None:
        """Limit the KV that a replica, and those after it on its device, keeps with a lender.
        Raises NotFound if no replica of that id has reported."""
        self.desired.limit(self._place(replica_id), lender, most_bytes)

    def move_shard(
        self, replica_id: str, lender: str, shard: ShardSpec | None, device: str | None = None
    ) -> None:
        """Have a lender's model, on ``device`` if given, compute a shard of a replica; None: have
        the shard come home. Raises NotFound if no replica of that id has reported."""
        desired = DesiredShard(shard, device) if shard else None
        self.desired.move_shard(self._place(replica_id), lender, desired)

    # What they are

    def shards(self, replica_id: str) -> dict[str, ShardSpec]:
        """The desired shards of a replica, by the lender's model. Raises NotFound if no replica of
        that id has reported."""
        return self.desired.shards(self._place(replica_id))

    def limits(self, replica_id: str) -> dict[str, int]:
        """Limits of a replica's loans in bytes, by the lender's model. Raises NotFound if no
        replica of that id has reported."""
        return self.desired.limits(self._place(replica_id))

    def state(self, now: float) -> LendingState:
        return LendingState(
            models=tuple(
                LendingModelState(
                    model=model.name,
                    lend_memory=model.kv_cache_memory if lending.auto else lending.lend_memory,
                    borrow_memory=model.kv_cache_memory if lending.auto else lending.borrow_memory,
                    tpot_budget=(
                        lending.tpot_budget if lending.lend_memory or lending.auto else None
                    ),
                )
                for model in self.registry.models
                if (lending := model.lending) is not None
            ),
            pairs=tuple(
                LendingPairState(
                    borrower=borrower,
                    lender=lender,
                    enabled=not self.desired.is_off(borrower, lender),
                    problem=self._problem(borrower, lender, now),
                    limits=self.desired.limits_of_pair(borrower, lender),
                )
                for borrower, lender in self._pairs()
            ),
            loans=tuple(self._loans(now)),
            lent=tuple(
                lent
                for replica in self.registry.snapshot(now).replicas
                for lent in replica.heartbeat.lent
            ),
        )

    # What a heartbeat changes, and is answered with

    def observe(self, before: Heartbeat | None, heartbeat: Heartbeat) -> None:
        """Take in a replica's heartbeat; ``before`` is the one that came before it, if any."""
        if before is None:
            self.desired.recover(heartbeat)
        else:
            self.desired.observe(before, heartbeat)

    def lenders_off(self, borrower: ReplicaRecord) -> tuple[str, ...]:
        return tuple(
            lender
            for lender in lenders_of(borrower.model, self.registry.models)
            if self.desired.is_off(borrower.model.name, lender)
        )

    def draining(self, borrower: ReplicaRecord) -> tuple[str, ...]:
        return tuple(
            loan.name
            for loan in borrower.heartbeat.loans
            if loan.name in self.desired.draining or self._must_leave(loan, borrower)
        )

    def borrowed_from(self, lender: ReplicaRecord, now: float) -> tuple[str, ...]:
        """Names of the loans that live borrowers have with a lender's replica."""
        return tuple(loan.name for loan in self._loans(now) if loan.lender_replica == lender.id)

    def lenders(self, borrower: ReplicaRecord, now: float) -> Iterator[LenderReplica]:
        """One replica of each lender's model: that on the desired device, that of the present
        loan, or the one with the fewest loans."""
        mine = {loan.lender_replica for loan in borrower.heartbeat.loans}
        if self.registry.record(borrower.model.name).presence is not Presence.READY:
            return
        if borrower.model.lending is not None and borrower.model.lending.auto:
            self.found.follow(self.registry, now, self.desired.pairs_off)
            yield from self.found.lender_of(borrower, self.registry)
            return
        asked = Counter(loan.lender_replica for loan in self._loans(now))
        place = place_of(borrower.heartbeat)
        for lender in lenders_of(borrower.model, self.registry.models):
            if lender == borrower.model.name and lender not in self.desired.shards(place):
                continue  # requests are shared out among replicas by their router
            device = self.desired.device_of(place, lender)
            best = min(
                self._may_lend_to(borrower, lender, now),
                key=lambda each: (
                    each.device != device,
                    each.id not in mine,
                    asked[each.id],
                    each.device,
                ),
                default=None,
            )
            if best is not None:
                yield LenderReplica(model=lender, id=best.id, address=best.heartbeat.address)

    def shard_lenders(self, borrower: ReplicaRecord, now: float) -> frozenset[str]:
        """Replicas that may compute a shard of the borrower's."""
        return frozenset(
            each.id
            for lender in lenders_of(borrower.model, self.registry.models)
            for each in self._may_lend_to(borrower, lender, now)
        )

    def _place(self, replica_id: str) -> Place:
        return place_of(self.registry.replica(replica_id).heartbeat)

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for model in self.registry.models:
            for lender in lenders_of(model, self.registry.models):
                yield model.name, lender
        found = {*self.found.models(self.registry)}
        yield from sorted(found | self.found.kept_apart(self.registry, self.desired.pairs_off))

    def _loans(self, now: float) -> Iterator[LoanState]:
        for replica in self.registry.snapshot(now).replicas:
            yield from replica.heartbeat.loans

    def _problem(self, borrower: str, lender: str, now: float) -> str | None:
        """Why the first replica that has no loan has none."""
        for replica in self.registry.live(borrower, now):
            said = replica.heartbeat.borrowing
            if said is not None and lender in said.problems:
                return said.problems[lender]
            if self.desired.limits(place_of(replica.heartbeat)).get(lender) == 0:
                return "a plan moved home what lay there, and lets nothing go there"
            if not any(self._may_lend(each, replica) for each in self.registry.live(lender, now)):
                return f"no other device of {replica.device}'s node has it ready to lend"
        return None

    def _may_lend_to(self, borrower: ReplicaRecord, lender: str, now: float) -> list[ReplicaRecord]:
        if self.desired.is_off(borrower.model.name, lender):
            return []
        return [each for each in self.registry.live(lender, now) if self._may_lend(each, borrower)]

    def _must_leave(self, loan: LoanState, borrower: ReplicaRecord) -> bool:
        # A controller that restarted does not know of a lender before its first heartbeat.
        lender = self.registry.find(loan.lender_replica)
        return lender is not None and not self._may_lend(lender, borrower)

    def _may_lend(self, lender: ReplicaRecord, borrower: ReplicaRecord) -> bool:
        stays = self.registry.record(lender.model.name).stays
        return stays and lender.may_lend_to(borrower)
