"""What moves requests between lending pairs, changes roles, and starts and ends replicas.

Each mover only writes down what the fleet is told with its next reports, and looks at what the
replicas then report; so telling it again changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.fleet.fleet import EngineRecord, Fleet
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Order, Progress
from loomserve.platform.rebalancing.observe import kv_at
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    Move,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.state.roles import Role

SetRoleOf = Callable[[str, Role], Awaitable[None]]
Scale = Callable[[str, int], Awaitable[None]]


def record_of(fleet: Fleet, replica_id: str) -> EngineRecord:
    """
    Raises:
        NotFound: the replica does not report any more.
    """
    return fleet.engine_record(replica_id, time.monotonic())


class RequestsActuator:
    """Raises and lowers how much a borrower's replica may have with a lender.

    Above the limit, requests move home where there is room, and are computed again where there is
    none. Below it the borrower itself decides what goes there.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def movable(self, engine: str) -> bool:
        return record_of(self._fleet, engine).report.model.lending is not None

    def order(self, name: str, action: Action) -> dict[str, Any]:
        assert isinstance(action, Move)
        borrower = record_of(self._fleet, action.engine)
        lender = record_of(self._fleet, action.lender).report.model.name
        there = _kv_there(borrower, lender)
        most = max(there - action.amount, 0) if action.back else there + action.amount
        return {
            "borrower": action.engine,
            "lender": lender,
            "limit": most,
            "limit_before": borrower.limits.get(lender),
            "bytes_before": there,
        }

    async def begin(self, order: Order) -> None:
        self._fleet.limit_loans(order["borrower"], order["lender"], order["limit"])

    async def abort(self, order: Order) -> None:
        self._fleet.limit_loans(order["borrower"], order["lender"], order["limit_before"])

    async def progress(self, order: Order) -> Progress:
        lender, limit = order["lender"], order["limit"]
        borrower = record_of(self._fleet, order["borrower"])
        said = borrower.report.borrowing
        reported = said.limits.get(lender) if said else None
        there = _kv_there(borrower, lender)
        moved = abs(there - order["bytes_before"])
        if borrower.limits.get(lender) != limit:
            back = reported == order["limit_before"]
            return Progress(outcome=ActionOutcome.ABORTED if back else ActionOutcome.RUNNING)
        loans = [loan for loan in said.loans if loan.lender == lender] if said else []
        done = reported == limit and there <= limit and (limit > 0 or not loans)
        return Progress(
            outcome=ActionOutcome.DONE if done else ActionOutcome.RUNNING, moved_bytes=moved
        )


def _kv_there(borrower: EngineRecord, lender: str) -> int:
    said, footprint = borrower.report.borrowing, borrower.report.footprint
    if said is None or footprint is None:
        raise Conflict(f"replica {borrower.report.replica_id!r} has not said what it borrows")
    return sum(kv_at(loan, footprint) for loan in said.loans if loan.lender == lender)


class RoleActuator:
    """Changes what is sent to a replica."""

    def __init__(self, fleet: Fleet, set_role: SetRoleOf) -> None:
        self._fleet, self._set_role = fleet, set_role

    def movable(self, engine: str) -> bool:
        return False

    def order(self, name: str, action: Action) -> dict[str, Any]:
        assert isinstance(action, SetRole)
        before = record_of(self._fleet, action.engine).role
        return {"replica": action.engine, "role": action.role, "role_before": before}

    async def begin(self, order: Order) -> None:
        await self._set_role(order["replica"], Role(order["role"]))

    async def abort(self, order: Order) -> None:
        await self._set_role(order["replica"], Role(order["role_before"]))

    async def progress(self, order: Order) -> Progress:
        record = record_of(self._fleet, order["replica"])
        if record.report.stats.role != record.role:
            return Progress()  # it learns of it with its next report
        done = record.role == order["role"]
        return Progress(outcome=ActionOutcome.DONE if done else ActionOutcome.ABORTED)


class ReplicasActuator:
    """Starts a replica more, which takes the first free device, or ends the newest."""

    def __init__(self, fleet: Fleet, scale: Scale) -> None:
        self._fleet, self._scale = fleet, scale

    def movable(self, engine: str) -> bool:
        return False

    def order(self, name: str, action: Action) -> dict[str, Any]:
        match action:
            case AddReplica():
                model, leaving, more = action.model, None, 1
            case RemoveReplica():
                leaving, more = action.engine, -1
                model = record_of(self._fleet, action.engine).report.model.name
            case _:
                raise AssertionError(f"{action} is of another kind")
        before = self._target(model)
        return {
            "model": model,
            "replicas": before + more,
            "replicas_before": before,
            "there_before": sorted(self._live(model)),
            "leaving": leaving,
        }

    async def begin(self, order: Order) -> None:
        await self._scale(order["model"], order["replicas"])

    async def abort(self, order: Order) -> None:
        await self._scale(order["model"], order["replicas_before"])

    async def progress(self, order: Order) -> Progress:
        there, before = self._live(order["model"]), set(order["there_before"])
        if self._target(order["model"]) == order["replicas_before"]:
            back = len(there) == order["replicas_before"]
            return Progress(outcome=ActionOutcome.ABORTED if back else ActionOutcome.RUNNING)
        if len(there) != order["replicas"]:
            return Progress()
        gone = before - there
        if order["leaving"] is not None and gone != {order["leaving"]}:
            await self.abort(order)
            went = ", ".join(sorted(gone)) or "none"
            return Progress(
                outcome=ActionOutcome.FAILED,
                message=f"Serve ended {went} instead; as many replicas as before are started",
            )
        return Progress(outcome=ActionOutcome.DONE)

    def _target(self, model: str) -> int:
        targets = self._fleet.model_targets()
        if model not in targets:
            raise NotFound(f"model {model!r} is not served any more")
        return targets[model]

    def _live(self, model: str) -> set[str]:
        records = self._fleet.engine_records(time.monotonic())
        return {each.report.replica_id for each in records if each.report.model.name == model}
