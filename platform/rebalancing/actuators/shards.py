"""Moves attention heads and layers: tells the fleet what a lender is to compute, and looks.

A loan carries the move out (:mod:`loomserve.platform.lending.engine.shards.migration`); telling
again changes nothing.
"""

from __future__ import annotations

import time
from typing import Any

from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Order, Progress
from loomserve.platform.rebalancing.actuators.replicas import record_of
from loomserve.platform.rebalancing.policy.actions import Action, Move
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state import LoanState
from loomserve.platform.state.lending_options import ShardSpec as MovedPart


class ShardActuator:
    """Of the fleet that is told."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def movable(self, engine: str) -> bool:
        return record_of(self._fleet, engine).report.model.lending is not None

    def order(self, name: str, action: Action) -> dict[str, Any]:
        """
        Raises:
            Conflict: something of the engine is away already, or not all of it comes home.
            NotFound: one of the replicas does not report any more.
        """
        assert isinstance(action, Move)
        there = record_of(self._fleet, action.lender).report
        lender = there.model.name
        away = self._fleet.shards(action.engine)
        if action.back:
            if _amount(away.get(lender)) != action.amount:
                raise Conflict(
                    f"{_amount(away.get(lender))} {action.kind} are with {lender!r}, which come "
                    "home together or not at all"
                )
        elif away:
            raise Conflict(
                f"{action.engine!r} has something with {', '.join(sorted(away))}: let it come home "
                "first"
            )
        part = None if action.back else self._part(action)
        return {
            "engine": action.engine,
            "lender": lender,
            "device": there.device,
            "part": part,
            "part_before": away.get(lender),
            "began_at": time.time(),
        }

    def _part(self, action: Move) -> MovedPart:
        if action.kind is MoveKind.HEADS:
            return {"heads": action.amount}
        footprint = record_of(self._fleet, action.engine).report.footprint
        if footprint is None:
            raise Conflict(f"{action.engine!r} has not said what it is made of: try again soon")
        # The last ones: which they are makes no difference to what moves.
        return {"layers": [footprint.layers - action.amount, footprint.layers]}

    async def begin(self, order: Order) -> None:
        self._fleet.move_shard(order["engine"], order["lender"], order["part"], order["device"])

    async def abort(self, order: Order) -> None:
        before = order["part_before"]
        self._fleet.move_shard(order["engine"], order["lender"], before, order["device"])

    async def progress(self, order: Order) -> Progress:
        lender, part = order["lender"], order["part"]
        said = record_of(self._fleet, order["engine"]).report.borrowing
        if said is None:
            return Progress()
        aborted = self._fleet.shards(order["engine"]).get(lender) != part
        wanted = order["part_before"] if aborted else part
        if said.shards.get(lender) != wanted:
            return Progress()  # it learns of it with its next report
        there = [each for each in said.loans if each.lender == lender and each.shard is not None]
        if any(each.draining for each in there):
            return _moving(there, "what is there comes home")
        if _settled(there, wanted):
            outcome = ActionOutcome.ABORTED if aborted else ActionOutcome.DONE
            return _moving(there, "").model_copy(update={"outcome": outcome})
        if lender in said.problems and not there:
            await self.abort(order)
            return Progress(outcome=ActionOutcome.FAILED, message=said.problems[lender])
        return _moving(there, "full blocks are copied")


def _amount(part: MovedPart | None) -> int:
    if part is None:
        return 0
    if "heads" in part:
        return int(part["heads"])
    first, end = part["layers"]
    return int(end - first)


def _settled(there: list[LoanState], wanted: MovedPart | None) -> bool:
    if wanted is None:
        return not there
    return any(each.shard is not None and each.shard.phase == "away" for each in there)


def _moving(there: list[LoanState], message: str) -> Progress:
    parts = [each.shard for each in there if each.shard is not None]
    return Progress(
        moved_bytes=sum(part.copied_bytes for part in parts),
        paused_s=max((part.pause_s for part in parts), default=0.0),
        message=message,
    )
