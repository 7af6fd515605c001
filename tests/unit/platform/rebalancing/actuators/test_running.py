"""Requests that go on with another replica, ordered over a real fleet by replicas that obey."""

from __future__ import annotations

import time

import pytest

from loomserve.platform.base.errors import NotFound
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import MovedRequests, MoveOrder
from loomserve.platform.rebalancing.actuators.base import ActionOutcome
from loomserve.platform.rebalancing.actuators.replicas import RunningActuator
from loomserve.platform.rebalancing.policy.actions import MoveRequests
from tests.unit.platform.fleet.heartbeats import fleet, report

pytestmark = pytest.mark.anyio

ACTION = MoveRequests(engine="r0", to="r1", requests=4)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def says(to: Fleet, moved: MovedRequests | None = None) -> MoveOrder | None:
    """The order in the answer to a heartbeat of r0."""
    return to.report(report("r0", "core0", moved=moved), time.monotonic()).move


@pytest.fixture
def two() -> Fleet:
    made = fleet()
    says(made)
    made.report(report("r1", "core1"), time.monotonic())
    return made


async def test_it_is_done_when_the_replica_says_so_and_is_ordered_once(two: Fleet) -> None:
    actuator = RunningActuator(two)
    record = actuator.prepare("p/0", ACTION)
    assert says(two) is None
    for _ in range(2):
        await actuator.begin(record)
        assert says(two) == MoveOrder(id="p/0", to="r1", requests=4)
        assert (await actuator.progress(record)).outcome is ActionOutcome.RUNNING
    says(two, MovedRequests(order="an earlier one", requests=9))
    assert (await actuator.progress(record)).outcome is ActionOutcome.RUNNING
    said = MovedRequests(order="p/0", requests=3)
    says(two, said)
    done = await actuator.progress(record)
    assert (done.outcome, done.message) == (ActionOutcome.DONE, "3 of 4 requests moved")
    assert says(two, said) is None
    # A controller that is started anew tells it again, and the replica has done it.
    await actuator.begin(record)
    assert (await actuator.progress(record)).outcome is ActionOutcome.DONE


async def test_an_abort_takes_the_order_back_and_nothing_that_has_moved(two: Fleet) -> None:
    actuator = RunningActuator(two)
    record = actuator.prepare("p/0", ACTION)
    await actuator.begin(record)
    await actuator.abort(record)
    assert says(two) is None
    progress = await actuator.progress(record)
    assert (progress.outcome, progress.message) == (
        ActionOutcome.ABORTED, "requests that have moved stay there",
    )  # fmt: skip
    await actuator.begin(record)
    says(two, MovedRequests(order="p/0", requests=4))
    await actuator.abort(record)
    assert (await actuator.progress(record)).outcome is ActionOutcome.DONE


async def test_an_abort_leaves_the_order_of_another_action(two: Fleet) -> None:
    actuator = RunningActuator(two)
    await actuator.begin(actuator.prepare("p/1", ACTION))
    await actuator.abort(actuator.prepare("p/0", ACTION))
    order = says(two)
    assert order is not None
    assert order.id == "p/1"


async def test_an_engine_that_cannot_be_asked_has_failed(two: Fleet) -> None:
    actuator = RunningActuator(two)
    record = actuator.prepare("p/0", ACTION)
    await actuator.begin(record)
    says(two, MovedRequests(order="p/0", requests=0, problem="the engine has ended"))
    failed = await actuator.progress(record)
    assert (failed.outcome, failed.message) == (ActionOutcome.FAILED, "the engine has ended")
    assert says(two) is None


async def test_a_replica_that_is_gone_takes_part_in_nothing(two: Fleet) -> None:
    actuator = RunningActuator(two)
    for gone in ({"engine": "r9"}, {"to": "r9"}):
        with pytest.raises(NotFound):
            actuator.prepare("p/0", ACTION.model_copy(update=gone))
    record = actuator.prepare("p/0", ACTION)
    await actuator.begin(record)
    del two.registry._replicas["r0"]
    with pytest.raises(NotFound):
        await actuator.progress(record)
