"""What operators and plans have ordered of loans: kept while replicas come and go.

A place is a model and its device; whichever replica is there is told the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from loomserve.platform.fleet.messages import EngineReport
from loomserve.platform.state.lending_options import Part

Place = tuple[str, str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PartOrder:
    """What of a replica a lender's model is to compute; ``device`` where, None: wherever it is."""

    part: Part
    device: str | None = None


@dataclass
class LoanOrders:
    """Pairs are of a borrower's and a lender's model."""

    draining: set[str] = field(default_factory=set)
    """Names of loans whose requests are to finish or leave."""
    _pairs_off: set[tuple[str, str]] = field(default_factory=set)
    _limits: dict[Place, dict[str, int]] = field(default_factory=dict)
    _parts: dict[Place, dict[str, PartOrder]] = field(default_factory=dict)

    def recover(self, report: EngineReport) -> None:
        """From what a replica was told by a controller before this one."""
        said, place = report.borrowing, place_of(report)
        if said is None:
            return
        self._pairs_off |= {(report.model.name, lender) for lender in said.switched_off}
        self._limits[place] = said.limits | self._limits.get(place, {})
        told = {lender: PartOrder(dict(part)) for lender, part in said.parts.items()}
        self._parts.setdefault(place, told)

    def learn(self, before: EngineReport, now: EngineReport) -> None:
        """A part that came home without an order stays there: its lender was slow, needed its
        memory or died, and whoever plans has to see that first.

        Args:
            before, now: reports of one replica that follow each other.
        """
        for lender in _with_parts(before) - _with_parts(now):
            self._parts.get(place_of(now), {}).pop(lender, None)

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

    def move_part(self, place: Place, lender: str, order: PartOrder | None) -> None:
        """What a lender's model is to compute; None: nothing, any more."""
        _tell(self._parts, place, lender, order)

    def limits(self, place: Place) -> dict[str, int]:
        """Bytes by the lender's model."""
        return dict(self._limits.get(place, {}))

    def parts(self, place: Place) -> dict[str, Part]:
        """By the lender's model."""
        return {lender: order.part for lender, order in self._parts.get(place, {}).items()}

    def device_of(self, place: Place, lender: str) -> str | None:
        """Where a lender's model is to compute what it was ordered to, if that was said."""
        order = self._parts.get(place, {}).get(lender)
        return order.device if order else None

    def limits_of_pair(self, borrower: str, lender: str) -> dict[str, int]:
        """Bytes by the borrower's device."""
        return {
            device: limits[lender]
            for (model, device), limits in self._limits.items()
            if model == borrower and lender in limits
        }


def _with_parts(report: EngineReport) -> set[str]:
    """Models that compute part of the replica's."""
    return {loan.lender for loan in report.loans if loan.part is not None and loan.part.is_away}


def place_of(report: EngineReport) -> Place:
    return report.model.name, report.device


def _tell(of: dict[Place, dict[str, _T]], place: Place, lender: str, what: _T | None) -> None:
    told = of.setdefault(place, {})
    if what is None:
        told.pop(lender, None)
    else:
        told[lender] = what
