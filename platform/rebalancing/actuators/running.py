"""Has requests of a replica go on with another one of its model.

The replica is told with its next heartbeat, carries each order out once, and says what came of it;
so telling again changes nothing.
"""

from __future__ import annotations

from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import MoveOrder
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Progress
from loomserve.platform.rebalancing.actuators.replicas import record_of
from loomserve.platform.rebalancing.plans.records import RunningRecord
from loomserve.platform.rebalancing.policy.actions import Action, MoveRequests


class RunningActuator:
    """Moves requests while they run; those that have moved stay where they are."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def movable(self, engine: str) -> bool:
        return False

    def prepare(self, name: str, action: Action) -> RunningRecord:
        """
        Raises:
            NotFound: one of the replicas does not report any more.
        """
        assert isinstance(action, MoveRequests)
        for replica in (action.engine, action.to):
            record_of(self._fleet, replica)
        return RunningRecord(
            name=name, engine=action.engine, to=action.to, requests=action.requests
        )

    async def begin(self, record: RunningRecord) -> None:
        self._fleet.orders[record.engine] = MoveOrder(
            id=record.name, to=record.to, requests=record.requests
        )

    async def abort(self, record: RunningRecord) -> None:
        self._forget(record)

    async def progress(self, record: RunningRecord) -> Progress:
        said = record_of(self._fleet, record.engine).heartbeat.moved
        if said is not None and said.order == record.name:
            self._forget(record)
            if said.problem:
                return Progress(outcome=ActionOutcome.FAILED, message=said.problem)
            told = f"{said.requests} of {record.requests} requests moved"
            return Progress(outcome=ActionOutcome.DONE, message=told)
        if not self._is_told(record):
            return Progress(
                outcome=ActionOutcome.ABORTED, message="requests that have moved stay there"
            )
        return Progress()  # the replica learns of it with its next heartbeat

    def _forget(self, record: RunningRecord) -> None:
        if self._is_told(record):
            del self._fleet.orders[record.engine]

    def _is_told(self, record: RunningRecord) -> bool:
        order = self._fleet.orders.get(record.engine)
        return order is not None and order.id == record.name
