"""What could be measured of a fleet, and what keeps anything from being decided on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated_dataclass

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.fleet.snapshot import FleetModel
from loomserve.platform.rebalancing.policy.snapshot import Snapshot


class Unfit(StrEnum):
    """Why a snapshot gives no plan."""

    EMPTY = "empty"
    STALE = "stale"
    PARTIAL = "partial"
    SETTLING = "settling"


@validated_dataclass(frozen=True)
class Flaw:
    """Something missing or unfit; ``subject`` names a device, engine or model."""

    why: Annotated[Unfit, Field(description="empty, partial, stale or settling.")]
    subject: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What could be measured, and what is missing. Without a snapshot, a figure in it would have to
    be made up; for ``scaled``, models scaled by load, less has to be measured."""

    snapshot: Snapshot | None
    missing: tuple[Flaw, ...]
    scaled: tuple[FleetModel, ...] = ()

    def flaws(self, options: Rebalancing) -> tuple[Flaw, ...]:
        """All that keeps anything from being decided on it."""
        return (*self.missing, *(flaws(self.snapshot, options) if self.snapshot else ()))


def listed(found: Iterable[Flaw]) -> str:
    """All of them, for a person."""
    return ", ".join(f"{flaw.subject} ({flaw.why})" for flaw in found)


def flaws(snapshot: Snapshot, options: Rebalancing) -> list[Flaw]:
    """What must be measured (again) before anything can be decided; empty: the snapshot is fit."""
    if len(snapshot.devices) < 2:
        return [Flaw(Unfit.EMPTY, "devices")]
    found = list(_missing(snapshot))
    for name, measured_at_s in _measured(snapshot):
        if snapshot.at_s - measured_at_s > options.stale_after_s or measured_at_s > snapshot.at_s:
            found.append(Flaw(Unfit.STALE, name))
        elif measured_at_s < snapshot.changed_at_s + options.settle_s:
            found.append(Flaw(Unfit.SETTLING, name))
    return found


def _measured(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    yield from ((each.name, each.measured_at_s) for each in snapshot.devices)
    yield from ((each.id, each.measured_at_s) for each in snapshot.engines)
    yield from ((f"{each.engine} at {each.lender}", each.measured_at_s) for each in snapshot.loans)


def _missing(snapshot: Snapshot) -> Iterator[Flaw]:
    devices = {device.name for device in snapshot.devices}
    models = {model.name for model in snapshot.models}
    engines = {engine.id for engine in snapshot.engines}
    for engine in snapshot.engines:
        if engine.device not in devices:
            yield Flaw(Unfit.PARTIAL, engine.device)
        if engine.model not in models:
            yield Flaw(Unfit.PARTIAL, engine.model)
    for model in snapshot.models:
        if len(snapshot.of(model.name)) != model.replicas:
            yield Flaw(Unfit.PARTIAL, model.name)
    for loan in snapshot.loans:
        for end in (loan.engine, loan.lender):
            if end not in engines:
                yield Flaw(Unfit.PARTIAL, end)
