"""Actuators that move requests between lending pairs or replicas, change roles, and start and end
replicas.

Each sets what the fleet's replicas are told with their next heartbeats, and looks at what they then
report; so telling again changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import MoveOrder
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Progress
from loomserve.platform.rebalancing.observe import kv_at
from loomserve.platform.rebalancing.plans.plans import (
    ReplicasRecord,
    RequestsRecord,
    RoleRecord,
    RunningRecord,
)
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.state.roles import Role

SetRoleOf = Callable[[str, Role], Awaitable[None]]
Scale = Callable[[str, int], Awaitable[None]]


def record_of(fleet: Fleet, replica_id: str) -> ReplicaRecord:
    """Raises NotFound if the replica does not report any more."""
    return fleet.registry.live_replica(replica_id, time.monotonic())


class RequestsActuator:
    """Raises and lowers the limit on the KV that a borrower's replica has with a lender. Above the
    limit, requests move home where there is room, and are computed again where there is none. Below
    the limit, placement is up to the borrower."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def prepare(self, name: str, action: Action) -> RequestsRecord:
        assert isinstance(action, Move)
        borrower = record_of(self._fleet, action.engine)
        lender = record_of(self._fleet, action.lender).model.name
        there = _kv_there(borrower, lender)
        return RequestsRecord(
            name=name,
            borrower=action.engine,
            lender=lender,
            limit=max(there - action.amount, 0) if action.back else there + action.amount,
            limit_before=self._fleet.loans.limits(action.engine).get(lender),
            bytes_before=there,
        )

    async def begin(self, record: RequestsRecord) -> None:
        self._fleet.loans.limit(record.borrower, record.lender, record.limit)

    async def abort(self, record: RequestsRecord) -> None:
        self._fleet.loans.limit(record.borrower, record.lender, record.limit_before)

    async def progress(self, record: RequestsRecord) -> Progress:
        lender, limit = record.lender, record.limit
        borrower = record_of(self._fleet, record.borrower)
        said = borrower.heartbeat.borrowing
        reported = said.limits.get(lender) if said else None
        there = _kv_there(borrower, lender)
        moved = abs(there - record.bytes_before)
        if self._fleet.loans.limits(record.borrower).get(lender) != limit:
            back = reported == record.limit_before
            return Progress(outcome=ActionOutcome.ABORTED if back else ActionOutcome.RUNNING)
        loans = [loan for loan in said.loans if loan.lender == lender] if said else []
        done = reported == limit and there <= limit and (limit > 0 or not loans)
        return Progress(
            outcome=ActionOutcome.DONE if done else ActionOutcome.RUNNING, moved_bytes=moved
        )


def _kv_there(borrower: ReplicaRecord, lender: str) -> int:
    said, footprint = borrower.heartbeat.borrowing, borrower.heartbeat.footprint
    if said is None or footprint is None:
        raise Conflict(f"replica {borrower.id!r} has not said what it borrows")
    return sum(kv_at(loan, footprint) for loan in said.loans if loan.lender == lender)


class RoleActuator:
    """Changes what is sent to a replica."""

    def __init__(self, fleet: Fleet, set_role: SetRoleOf) -> None:
        self._fleet, self._set_role = fleet, set_role

    def prepare(self, name: str, action: Action) -> RoleRecord:
        assert isinstance(action, SetRole)
        before = self._role(record_of(self._fleet, action.engine))
        return RoleRecord(name=name, replica=action.engine, role=action.role, role_before=before)

    async def begin(self, record: RoleRecord) -> None:
        await self._set_role(record.replica, record.role)

    async def abort(self, record: RoleRecord) -> None:
        await self._set_role(record.replica, record.role_before)

    async def progress(self, record: RoleRecord) -> Progress:
        there = record_of(self._fleet, record.replica)
        if there.heartbeat.stats.role != self._role(there):
            return Progress()  # the replica learns of it with its next heartbeat
        done = self._role(there) == record.role
        return Progress(outcome=ActionOutcome.DONE if done else ActionOutcome.ABORTED)

    def _role(self, replica: ReplicaRecord) -> Role:
        return self._fleet.registry.record(replica.model.name).role(replica.heartbeat)


class ReplicasActuator:
    """Starts one more replica, which takes the first free device, or ends a given one."""

    def __init__(self, fleet: Fleet, scale: Scale) -> None:
        self._fleet, self._scale = fleet, scale

    def prepare(self, name: str, action: Action) -> ReplicasRecord:
        match action:
            case AddReplica():
                model, leaving, more = action.model, None, 1
            case RemoveReplica():
                leaving, more = action.engine, -1
                model = record_of(self._fleet, action.engine).model.name
            case _:
                raise AssertionError(f"{action} is of another kind")
        before = self._target(model)
        return ReplicasRecord(
            name=name,
            model=model,
            replicas=before + more,
            replicas_before=before,
            there_before=tuple(sorted(self._live(model))),
            leaving=leaving,
        )

    async def begin(self, record: ReplicasRecord) -> None:
        registry = self._fleet.registry
        if record.leaving is not None and registry.find(record.leaving) is not None:
            registry.drains.ending.add(record.leaving)
        await self._scale(record.model, record.replicas)

    async def abort(self, record: ReplicasRecord) -> None:
        if record.leaving is not None:
            self._fleet.registry.drains.ending.discard(record.leaving)
        await self._scale(record.model, record.replicas_before)

    async def progress(self, record: ReplicasRecord) -> Progress:
        there, before = self._live(record.model), set(record.there_before)
        if self._target(record.model) == record.replicas_before:
            back = len(there) == record.replicas_before
            return Progress(outcome=ActionOutcome.ABORTED if back else ActionOutcome.RUNNING)
        if len(there) != record.replicas:
            return Progress()
        gone = before - there
        if record.leaving is not None and gone != {record.leaving}:
            await self.abort(record)
            went = ", ".join(sorted(gone)) or "none"
            return Progress(
                outcome=ActionOutcome.FAILED,
                message=f"{went} ended instead; as many replicas as before are started",
            )
        return Progress(outcome=ActionOutcome.DONE)

    def _target(self, model: str) -> int:
        targets = self._fleet.registry.targets()
        if model not in targets:
            raise NotFound(f"model {model!r} is not served any more")
        return targets[model]

    def _live(self, model: str) -> set[str]:
        return {each.id for each in self._fleet.registry.live(model, time.monotonic())}


class RunningActuator:
    """Moves requests while they run; those that have moved stay where they are. The replica carries
    each order out once, and says what came of it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def prepare(self, name: str, action: Action) -> RunningRecord:
        """Raises NotFound if one of the replicas does not report any more."""
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
