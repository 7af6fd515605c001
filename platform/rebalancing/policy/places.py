"""Where each thing of a snapshot is found, so that nothing is looked for through all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar


class _Engine(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def model(self) -> str: ...


class _Link(Protocol):
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...


class _Loan(Protocol):
    @property
    def engine(self) -> str: ...
    @property
    def lender(self) -> str: ...


_T = TypeVar("_T")
_LinkT = TypeVar("_LinkT", bound=_Link)
_LoanT = TypeVar("_LoanT", bound=_Loan)


@dataclass(frozen=True, slots=True)
class SnapshotPlaces(Generic[_LinkT, _LoanT]):
    """Places in a snapshot's tuples; of several of one name, the first.

    Attributes:
        devices: Devices by name.
        models: Models by name.
        engines: Engines by id.
        on: Engines by device.
        of: Engines by model.
        links: Links by source and target.
        loans_at: Loans by lender.
        loans_of: Loans by engine.
    """

    devices: dict[str, int]
    models: dict[str, int]
    engines: dict[str, int]
    on: dict[str, tuple[int, ...]]
    of: dict[str, tuple[int, ...]]
    links: dict[tuple[str, str], _LinkT]
    loans_at: dict[str, tuple[_LoanT, ...]]
    loans_of: dict[str, tuple[_LoanT, ...]]

    @classmethod
    def made(
        cls,
        devices: Iterable[str],
        models: Iterable[str],
        engines: Sequence[_Engine],
        links: Sequence[_LinkT],
        loans: Sequence[_LoanT],
    ) -> SnapshotPlaces[_LinkT, _LoanT]:
        """``devices`` and ``models`` are names."""
        return cls(
            devices=_first(devices),
            models=_first(models),
            engines=_first(each.id for each in engines),
            on=_grouped(range(len(engines)), lambda place: engines[place].device),
            of=_grouped(range(len(engines)), lambda place: engines[place].model),
            links={(link.source, link.target): link for link in reversed(links)},
            loans_at=_grouped(loans, lambda loan: loan.lender),
            loans_of=_grouped(loans, lambda loan: loan.engine),
        )

    def with_loan(self, before: _LoanT, after: _LoanT | None) -> SnapshotPlaces[_LinkT, _LoanT]:
        """With a loan behind all others, in the place of one that may not have been there."""
        loans_at, loans_of = dict(self.loans_at), dict(self.loans_of)
        for loans, key in ((loans_at, before.lender), (loans_of, before.engine)):
            others = tuple(each for each in loans.get(key, ()) if each is not before)
            loans[key] = others if after is None else (*others, after)
        return replace(self, loans_at=loans_at, loans_of=loans_of)


def _first(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, name in enumerate(names):
        found.setdefault(name, place)
    return found


def _grouped(all_: Sequence[_T], key: Callable[[_T], str]) -> dict[str, tuple[_T, ...]]:
    found: dict[str, list[_T]] = {}
    for each in all_:
        found.setdefault(key(each), []).append(each)
    return {name: tuple(group) for name, group in found.items()}
