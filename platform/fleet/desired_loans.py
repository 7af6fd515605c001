"""Loans as operators and plans want them.

They belong to a place, which is a model on a device: whichever replica is there is told the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from loomserve.platform.fleet.messages import Heartbeat
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
