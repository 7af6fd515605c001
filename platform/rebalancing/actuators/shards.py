"""Moves attention heads and layers: tells the fleet what a lender is to compute, and looks.

A loan carries the move out (:mod:`loomserve.platform.lending.engine.shards.migration`); telling
again changes nothing.
"""

from __future__ import annotations

from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.rebalancing.actuators.base import ActionOutcome, Progress
from loomserve.platform.rebalancing.actuators.replicas import record_of
from loomserve.platform.rebalancing.plans.plans import ShardRecord
from loomserve.platform.rebalancing.policy.actions import Action, Move
from loomserve.platform.rebalancing.policy.snapshot import MoveKind
from loomserve.platform.state import LoanState
from loomserve.platform.state.lending_options import ShardSpec


class ShardActuator:
    """Moves a shard of an engine to a lender, or home."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def prepare(self, name: str, action: Action) -> ShardRecord:
        """Raises Conflict if a shard of the engine is away already, or not all of it would come
        home; NotFound if one of the replicas does not report any more."""
        assert isinstance(action, Move)
        there = record_of(self._fleet, action.lender).heartbeat
        lender = there.model.name
        away = self._fleet.loans.shards(action.engine)
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
        return ShardRecord(
            name=name,
            engine=action.engine,
            lender=lender,
            device=there.device,
            shard=None if action.back else self._shard(action),
            shard_before=away.get(lender),
        )

    def _shard(self, action: Move) -> ShardSpec:
        if action.kind is MoveKind.HEADS:
            return {"heads": action.amount}
        footprint = record_of(self._fleet, action.engine).heartbeat.footprint
        if footprint is None:
            raise Conflict(f"{action.engine!r} has not said what it is made of: try again soon")
        # The last ones: which they are makes no difference to what moves.
        return {"layers": [footprint.layers - action.amount, footprint.layers]}

    async def begin(self, record: ShardRecord) -> None:
        self._fleet.loans.move_shard(record.engine, record.lender, record.shard, record.device)

    async def abort(self, record: ShardRecord) -> None:
        self._fleet.loans.move_shard(
            record.engine, record.lender, record.shard_before, record.device
        )

    async def progress(self, record: ShardRecord) -> Progress:
        lender = record.lender
        said = record_of(self._fleet, record.engine).heartbeat.borrowing
        if said is None:
            return Progress()
        aborted = self._fleet.loans.shards(record.engine).get(lender) != record.shard
        wanted = record.shard_before if aborted else record.shard
        if said.shards.get(lender) != wanted:
            return Progress()  # the engine learns of it with its next heartbeat
        there = [each for each in said.loans if each.lender == lender and each.shard is not None]
        if any(each.draining for each in there):
            return _moving(there, "what is there comes home")
        if _settled(there, wanted):
            outcome = ActionOutcome.ABORTED if aborted else ActionOutcome.DONE
            return _moving(there, "").model_copy(update={"outcome": outcome})
        if lender in said.problems and not there:
            await self.abort(record)
            return Progress(outcome=ActionOutcome.FAILED, message=said.problems[lender])
        return _moving(there, "full blocks are copied")


def _amount(shard: ShardSpec | None) -> int:
    if shard is None:
        return 0
    if "heads" in shard:
        return int(shard["heads"])
    first, end = shard["layers"]
    return int(end - first)


def _settled(there: list[LoanState], wanted: ShardSpec | None) -> bool:
    if wanted is None:
        return not there
    return any(each.shard is not None and each.shard.phase == "away" for each in there)


def _moving(there: list[LoanState], message: str) -> Progress:
    shards = [each.shard for each in there if each.shard is not None]
    return Progress(
        moved_bytes=sum(shard.copied_bytes for shard in shards),
        paused_s=max((shard.pause_s for shard in shards), default=0.0),
        message=message,
    )
