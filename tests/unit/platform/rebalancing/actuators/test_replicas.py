"""The actuators over a real fleet, whose replicas report what they are told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from loomserve.platform.base.errors import NotFound
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Actuator
from loomserve.platform.rebalancing.actuators.replicas import (
    ReplicasActuator,
    RequestsActuator,
    RoleActuator,
)
from loomserve.platform.rebalancing.plans.plans import ActionRecord
from loomserve.platform.rebalancing.policy.actions import AddReplica, Move, RemoveReplica, SetRole
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state.roles import Role
from tests.unit.platform.fleet.heartbeats import (
    COLD,
    DEVICES,
    MODEL,
    borrowing,
    lending_fleet,
    loan,
    report,
)
from tests.unit.platform.rebalancing.test_observe import MIB, footprint

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def now() -> float:
    return time.monotonic()


async def outcome(actuator: Actuator[Any], record: ActionRecord) -> ActionOutcome:
    return (await actuator.progress(record)).outcome


@dataclass
class Borrower:
    """Its loan has four blocks of a MiB, of which it uses some."""

    fleet: Fleet
    used: int = 3
    limits: dict[str, int] = field(default_factory=dict)
    loan: bool = True

    def reports(self) -> None:
        loans = [loan("c1").model_copy(update={"free_blocks": 4 - self.used})] if self.loan else []
        said: Heartbeat = borrowing(*loans, limits=self.limits)
        desired = self.fleet.report(said.model_copy(update={"footprint": footprint()}), now())
        self.limits = desired.lender_limits


@pytest.fixture
def borrower() -> Borrower:
    fleet = lending_fleet()
    fleet.report(report("c1", "core1", model=COLD), now())
    borrower = Borrower(fleet)
    borrower.reports()
    return borrower


def move(amount: int, *, back: bool) -> Move:
    return Move(kind=MoveKind.REQUESTS, engine="h0", lender="c1", amount=amount, back=back)


async def test_requests_come_home_once_the_borrower_knows_and_keeps_the_limit(
    borrower: Borrower,
) -> None:
    actuator = RequestsActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MIB, back=True))
    assert borrower.fleet.loans.limits("h0") == {}
    await actuator.begin(record)
    await actuator.begin(record)
    assert borrower.fleet.loans.limits("h0") == {"org/cold": 2 * MIB}
    for used, done in ((3, False), (3, False), (2, True)):
        assert (await outcome(actuator, record) is ActionOutcome.DONE) is False
        borrower.used = used
        borrower.reports()
        borrower.reports()
        assert (await outcome(actuator, record) is ActionOutcome.DONE) is done
        if done:
            break
    assert (await actuator.progress(record)).moved_bytes == MIB


async def test_the_last_of_a_loan_goes_with_the_loan(borrower: Borrower) -> None:
    actuator = RequestsActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(3 * MIB, back=True))
    await actuator.begin(record)
    borrower.used = 0
    borrower.reports()
    borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    borrower.loan = False
    borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.DONE


async def test_a_raised_limit_is_done_when_it_is_known_and_an_abort_restores_the_one_before(
    borrower: Borrower,
) -> None:
    borrower.fleet.loans.limit("h0", "org/cold", 3 * MIB)
    for _ in range(2):
        borrower.reports()
    actuator = RequestsActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MIB, back=False))
    await actuator.begin(record)
    borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    await actuator.abort(record)
    borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.ABORTED
    await actuator.begin(record)
    for _ in range(2):
        borrower.reports()
    assert await outcome(actuator, record) is ActionOutcome.DONE
    assert borrower.limits == {"org/cold": 4 * MIB}


async def test_a_replica_that_is_gone_cannot_be_told_anything(borrower: Borrower) -> None:
    actuator = RequestsActuator(borrower.fleet)
    record = actuator.prepare("p/0", move(MIB, back=True)).model_copy(update={"borrower": "h9"})
    with pytest.raises(NotFound):
        await actuator.begin(record)
    with pytest.raises(NotFound):
        await actuator.progress(record)


def serving(*replicas: tuple[str, str]) -> Fleet:
    fleet = Fleet(DEVICES, drain_timeout_s=60)
    fleet.registry.add(MODEL, len(replicas))
    for name, device in replicas:
        fleet.report(report(name, device), now())
    return fleet


async def test_a_role_is_changed_once_the_replica_reports_it_and_changed_back() -> None:
    fleet = serving(("r0", "core0"))

    async def set_role(replica: str, role: Role) -> None:
        fleet.registry.set_role(replica, role)

    actuator = RoleActuator(fleet, set_role)
    record = actuator.prepare("p/0", SetRole(engine="r0", role=Role.PREFILL))
    await actuator.begin(record)
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    fleet.report(report("r0", "core0", role=Role.PREFILL), now())
    assert await outcome(actuator, record) is ActionOutcome.DONE
    await actuator.abort(record)
    fleet.report(report("r0", "core0", role=Role.UNIFIED), now())
    assert await outcome(actuator, record) is ActionOutcome.ABORTED


def scaling(fleet: Fleet) -> ReplicasActuator:
    async def scale(model: str, replicas: int) -> None:
        fleet.registry.set_target(model, replicas)

    return ReplicasActuator(fleet, scale)


async def test_a_replica_more_is_done_when_it_reports() -> None:
    fleet = serving(("r0", "core0"))
    actuator = scaling(fleet)
    record = actuator.prepare("p/0", AddReplica(model="org/m", device="core1"))
    for _ in range(2):
        await actuator.begin(record)
        assert fleet.registry.targets() == {"org/m": 2}
        assert await outcome(actuator, record) is ActionOutcome.RUNNING
    fleet.report(report("r1", "core1"), now())
    assert await outcome(actuator, record) is ActionOutcome.DONE


async def test_a_replica_that_is_not_wanted_any_more_is_not_started() -> None:
    fleet = serving(("r0", "core0"))
    actuator = scaling(fleet)
    record = actuator.prepare("p/0", AddReplica(model="org/m", device="core1"))
    await actuator.begin(record)
    await actuator.abort(record)
    assert fleet.registry.targets() == {"org/m": 1}
    assert await outcome(actuator, record) is ActionOutcome.ABORTED


@pytest.mark.parametrize(
    ("goes", "ends"), [("r1", ActionOutcome.DONE), ("r0", ActionOutcome.FAILED)]
)
async def test_the_replica_that_was_meant_must_be_the_one_that_went(
    goes: str, ends: ActionOutcome
) -> None:
    fleet = serving(("r0", "core0"), ("r1", "core1"))
    actuator = scaling(fleet)
    record = actuator.prepare("p/0", RemoveReplica(engine="r1"))
    await actuator.begin(record)
    assert fleet.registry.targets() == {"org/m": 1}
    assert fleet.registry.drains.ending == {"r1"}, "it is the first to be ended"
    assert await outcome(actuator, record) is ActionOutcome.RUNNING
    del fleet.registry._replicas[goes]
    progress = await actuator.progress(record)
    assert progress.outcome is ends
    if ends is ActionOutcome.FAILED:
        assert "r0" in progress.message
        assert fleet.registry.targets() == {"org/m": 2}
        assert not fleet.registry.drains.ending
