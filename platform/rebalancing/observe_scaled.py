"""Makes the part of the snapshot that scaling is decided on, of the fleet's heartbeats."""

from __future__ import annotations

from loomserve.platform.fleet.registry import ModelRecord, Registry, ReplicaRecord
from loomserve.platform.rebalancing.policy.rates import Rates
from loomserve.platform.rebalancing.policy.scaled import ScaledModel, ScaledReplica
from loomserve.platform.state import BorrowingState, ReplicaLoad


def scaled_models(registry: Registry, rates: Rates, now: float) -> tuple[ScaledModel, ...]:
    """Models that are ready, and whose load decides on their replicas.

    Args:
        registry: of the fleet.
        rates: of the replicas' sums.
        now: by the fleet's clock, of which their times are.
    """
    return tuple(
        model
        for record in registry.records
        if (model := _model(record, registry, rates, now)) is not None
    )


def _model(record: ModelRecord, registry: Registry, rates: Rates, now: float) -> ScaledModel | None:
    rules, model = record.model.scaling, record.model
    if rules is None or not record.stays or record.fixed:
        return None
    live = registry.live(model.name, now)
    replicas = [
        _replica(each, load, each.id in registry.drains.leaving)
        for each in live
        if each.id not in registry.drains.ending and (load := each.heartbeat.stats.load) is not None
    ]
    grown = [found["requests"] for each in live if (found := rates.of(each.id)) is not None]
    starts = [each.heartbeat.footprint.start_s for each in live if each.heartbeat.footprint]
    return ScaledModel(
        name=model.name,
        rules=rules,
        most=min(rules.max, model.most_replicas),
        target=record.target_replicas,
        replicas=tuple(replicas),
        arrived_per_s=sum(grown) if grown else None,
        start_s=max(starts, default=0.0),
    )


def _replica(record: ReplicaRecord, load: ReplicaLoad, leaving: bool) -> ScaledReplica:
    report = record.heartbeat
    return ScaledReplica(
        id=record.id,
        device=record.device,
        running=load.running,
        waiting=load.waiting,
        max_running=report.stats.max_running,
        kv_share=_kv_share(load, report.borrowing),
        oldest_waiting_s=load.oldest_waiting_s,
        tpot_s=load.step_time_s,
        # One that has not been measured yet has just come.
        ready_at_s=report.footprint.ready_at if report.footprint else float("inf"),
        leaving=leaving,
        # By a report of after it knew that it is drained; one from before may be out of date.
        settled=report.stats.draining
        and not (report.in_flight or report.lent or load.running or load.waiting),
    )


def _kv_share(load: ReplicaLoad, borrowing: BorrowingState | None) -> float:
    """The share of KV blocks in use; what lenders grant is room that it has already."""
    if borrowing is None:
        return load.kv_cache_usage
    loans = [loan for loan in borrowing.loans if loan.shard is None]
    blocks = borrowing.own_blocks + sum(loan.usable_blocks for loan in loans)
    free = borrowing.own_free_blocks + sum(loan.free_blocks for loan in loans)
    return (blocks - free) / blocks if blocks else 0.0
