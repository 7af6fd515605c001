"""What operators and plans have ordered of loans: kept while replicas come and go.

A place is a model and its device; whichever replica is there is told the same.
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
    """What of a replica a lender's model is to compute; ``device`` where, None: wherever it is."""

    shard: ShardSpec
    device: str | None = None


@dataclass
class DesiredLoans:
    """Pairs are of a borrower's and a lender's model."""

    draining: set[str] = field(default_factory=set)
    """Names of loans whose requests are to finish or leave."""
    _pairs_off: set[tuple[str, str]] = field(default_factory=set)
    _limits: dict[Place, dict[str, int]] = field(default_factory=dict)
    _shards: dict[Place, dict[str, DesiredShard]] = field(default_factory=dict)

    def recover(self, report: Heartbeat) -> None:
        """From what a replica was told by a controller before this one."""
        said, place = report.borrowing, place_of(report)
        if said is None:
            return
        self._pairs_off |= {(report.model.name, lender) for lender in said.switched_off}
        self._limits[place] = said.limits | self._limits.get(place, {})
        told = {lender: DesiredShard(dict(shard)) for lender, shard in said.shards.items()}
        self._shards.setdefault(place, told)

    def observe(self, before: Heartbeat, now: Heartbeat) -> None:
        """A shard that came home although it is desired stays home: its lender was slow, needed its
        memory or died, and whoever plans has to see that first.

        Args:
            before, now: reports of one replica that follow each other.
        """
        for lender in _with_shards(before) - _with_shards(now):
            self._shards.get(place_of(now), {}).pop(lender, None)

    def is_off(self, borrower: str, lender: str) -> bool:
        """Whether an operator wants no loan between the two."""
        return (borrower, lender) in self._pairs_off

    def switch(self, borrower: str, lender: str, enabled: bool) -> None:
        """Where the pair is enabled, the limits that plans have set end."""
        if not enabled:
            self._pairs_off.add((borrower, lender))
            return
        self._pairs_off.discard((borrower, lender))
        for (model, _), limits in self._limits.items():
            if model == borrower:
                limits.pop(lender, None)

    def limit(self, place: Place, lender: str, most_bytes: int | None) -> None:
        """How much KV may be with a lender's model; None: as much as its borrower finds right."""
        _tell(self._limits, place, lender, most_bytes)

    def move_shard(self, place: Place, lender: str, desired: DesiredShard | None) -> None:
        """What a lender's model is to compute; None: nothing, any more."""
        _tell(self._shards, place, lender, desired)

    def limits(self, place: Place) -> dict[str, int]:
        """Bytes by the lender's model."""
        return dict(self._limits.get(place, {}))

    def shards(self, place: Place) -> dict[str, ShardSpec]:
        """By the lender's model."""
        return {lender: desired.shard for lender, desired in self._shards.get(place, {}).items()}

    def device_of(self, place: Place, lender: str) -> str | None:
        """Where a lender's model is to compute what it was ordered to, if that was said."""
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
    """Models that compute a shard of the replica's."""
    return {loan.lender for loan in report.loans if loan.shard is not None and loan.shard.is_away}


def place_of(report: Heartbeat) -> Place:
    return report.model.name, report.device


def _tell(of: dict[Place, dict[str, _T]], place: Place, lender: str, what: _T | None) -> None:
    told = of.setdefault(place, {})
    if what is None:
        told.pop(lender, None)
    else:
        told[lender] = what
