"""Heads and layers, moved over a real fleet by a borrower that does what it is told, in time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.rebalancing.actuators.base import ActionOutcome
from loomserve.platform.rebalancing.actuators.shards import ShardActuator
from loomserve.platform.rebalancing.plans.plans import ShardRecord
from loomserve.platform.rebalancing.policy.actions import Move
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state import LoanState, ShardState
from loomserve.platform.state.lending_options import ShardSpec as MovedPart
from tests.unit.platform.fleet.heartbeats import COLD, borrowing, lending_fleet, loan, report
from tests.unit.platform.rebalancing.test_observe import footprint

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Borrower:
    """One of whose parts is with a lender, in some phase."""

    fleet: Fleet
    told: dict[str, MovedPart] = field(default_factory=dict)
    phase: str | None = None
    problem: str | None = None

    def reports(self, phase: str | None = None) -> None:
        self.phase = phase
        problems = {"org/cold": self.problem} if self.problem else {}
        said = borrowing(*self._loans(), shards=self.told, problems=problems)
        said = said.model_copy(update={"footprint": footprint()})
        self.told = self.fleet.report(said, time.monotonic()).shards

    def _loans(self) -> list[LoanState]:
        if self.phase is None:
            return []
        part = ShardState(heads=1, phase=self.phase, pause_s=0.02, copied_bytes=4096)
        coming_home = self.phase == "returning"
        return [loan("c1").model_copy(update={"shard": part, "draining": coming_home})]


@pytest.fixture
def borrower() -> Borrower:
    fleet = lending_fleet()
    fleet.report(report("c1", "core1", model=COLD), time.monotonic())
    some = Borrower(fleet)
    some.reports()
    return some


def move(kind: MoveKind, amount: int, *, back: bool = False) -> Move:
    return Move(kind=kind, engine="h0", lender="c1", amount=amount, back=back)


async def outcome(actuator: ShardActuator, record: ShardRecord) -> ActionOutcome:
    return (await actuator.progress(record)).outcome


async def test_heads_are_away_once_the_engine_says_so_and_home_once_the_loan_is_gone(
    borrower: Borrower,
) -> None:
    actuator = ShardActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MoveKind.HEADS, 1))
    assert not borrower.fleet.loans.shards("h0")
    await actuator.begin(record)
    assert borrower.fleet.loans.shards("h0") == {"org/cold": {"heads": 1}}
    for phase in (None, None, "leaving"):
        borrower.reports(phase)
        assert await outcome(actuator, record) is ActionOutcome.RUNNING
    borrower.reports("away")
    done = await actuator.progress(record)
    assert (done.outcome, done.moved_bytes, done.paused_s) == (ActionOutcome.DONE, 4096, 0.02)

    home = actuator.prepare("p/1", move(MoveKind.HEADS, 1, back=True))
    await actuator.begin(home)
    for phase in ("away", "away", "returning"):
        borrower.reports(phase)
        assert await outcome(actuator, home) is ActionOutcome.RUNNING
    borrower.reports(None)
    assert await outcome(actuator, home) is ActionOutcome.DONE


async def test_layers_that_move_are_the_last_ones(borrower: Borrower) -> None:
    actuator = ShardActuator(borrower.fleet)
    every = footprint().layers
    record = actuator.prepare("p/0", move(MoveKind.LAYERS, 2))
    assert record.shard == {"layers": [every - 2, every]}


async def test_an_abort_is_done_when_nothing_is_there_any_more(borrower: Borrower) -> None:
    actuator = ShardActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MoveKind.HEADS, 1))
    await actuator.begin(record)
    borrower.reports()
    borrower.reports("leaving")
    await actuator.abort(record)
    borrower.reports("leaving")
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    borrower.reports("returning")
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    borrower.reports(None)
    assert await outcome(actuator, record) is ActionOutcome.ABORTED


async def test_what_the_engine_refuses_has_failed_with_its_reason_and_is_not_asked_again(
    borrower: Borrower,
) -> None:
    actuator = ShardActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MoveKind.LAYERS, 2))
    await actuator.begin(record)
    borrower.reports()
    borrower.problem = "layers of this model cannot move"
    borrower.reports()
    failed = await actuator.progress(record)
    assert (failed.outcome, failed.message) == (ActionOutcome.FAILED, borrower.problem)
    assert not borrower.fleet.loans.shards("h0")


async def test_one_thing_is_away_at_a_time_and_comes_home_whole(borrower: Borrower) -> None:
    actuator = ShardActuator(borrower.fleet)
    with pytest.raises(Conflict, match="0 heads are with 'org/cold'"):
        actuator.prepare("p/0", move(MoveKind.HEADS, 1, back=True))
    await actuator.begin(actuator.prepare("p/0", move(MoveKind.HEADS, 2)))
    with pytest.raises(Conflict, match="let it come home first"):
        actuator.prepare("p/1", move(MoveKind.HEADS, 1))
    with pytest.raises(Conflict, match="come home together"):
        actuator.prepare("p/1", move(MoveKind.HEADS, 1, back=True))


async def test_a_part_that_came_home_by_itself_is_not_sent_again(borrower: Borrower) -> None:
    actuator = ShardActuator(borrower.fleet)
    await actuator.begin(actuator.prepare("p/0", move(MoveKind.HEADS, 1)))
    for phase in (None, "leaving", "away", "returning"):
        borrower.reports(phase)
        assert borrower.told
    borrower.reports(None)
    assert not borrower.told
    assert actuator.prepare("p/1", move(MoveKind.HEADS, 2)).shard == {"heads": 2}


def test_a_new_controller_learns_what_is_away(borrower: Borrower) -> None:
    borrower.fleet.loans.move_shard("h0", "org/cold", {"heads": 1})
    borrower.reports()
    borrower.reports("away")
    borrower.fleet = lending_fleet()
    borrower.reports("away")
    assert borrower.told == {"org/cold": {"heads": 1}}
