"""A borrower's loan, as its scheduler sees it, and what it learns of the lender from each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.scheduling.partition_use import PartitionUse
from loomserve.platform.lending.engine.shards.migration import ShardMigration
from loomserve.platform.lending.policy.limits import LoanLimit, Observation, after
from loomserve.platform.lending.policy.partition_choice import PartitionCosts
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import RingStats

Copy = Callable[[list[tuple[int, int]]], bool]
"""Copies each pair's first block onto its second; False if a lender's ring has closed."""

_SMOOTHING = 0.1


@dataclass
class Loan:
    """Memory of one lender; the first ``usable`` of its ``blocks`` may be used."""

    name: str
    partition: int
    ring: Ring
    blocks: range
    seen: RingStats
    limit: LoanLimit
    usual_delay_s: float = 0.0
    shard: ShardMigration | None = None
    """Set if a shard of all requests lies there, and no request as a whole."""
    layers: bool = False
    """Whether that shard is layers, which compute more than attention."""
    usable: int = 0
    most: int | None = None
    """Blocks that may be used however many the lender grants."""
    open: bool = True
    """Whether requests may start there, or the shard may stay."""


def observe(
    loan: Loan, use: PartitionUse, costs: PartitionCosts, kv_heads: int, step_s: float, now: float
) -> None:
    """Update a partition's costs and its loan's limit, after a step of ``step_s`` seconds.
    ``kv_heads`` are the engine's own."""
    before, loan.seen = loan.seen, loan.ring.stats()
    grown = loan.seen.since(before)
    service_s, delay_s, wait_s = (
        ns / 1e9 for ns in (grown.service_ns, grown.pickup_ns, grown.wait_ns)
    )
    tasks = grown.tasks
    tokens = _attended_by(loan, use, kv_heads)
    costs.saw_lender(loan.partition, tokens, service_s, delay_s)
    loan.limit = after(
        loan.limit,
        Observation(
            tasks=tasks,
            step_s=step_s,
            late_s=min(step_s, max(0.0, wait_s - service_s)),
            # The ring keeps the longest ever. In a step with a stall, what was not service
            # exceeds the usual by it.
            worst_wait_s=max(0.0, wait_s - service_s - tasks * loan.usual_delay_s),
            used_tokens=tokens,
        ),
        now,
    )
    if tasks:
        delay_s = max(0.0, wait_s - service_s) / tasks
        loan.usual_delay_s += _SMOOTHING * (delay_s - loan.usual_delay_s)


def _attended_by(loan: Loan, use: PartitionUse, kv_heads: int) -> int:
    """Tokens of context there, as many as if all of their heads were."""
    if loan.shard is None:
        return use.context_on(loan.partition)
    if loan.layers:
        return 0
    return use.context_on(OWN) * loan.shard.away * loan.ring.geometry.kv_heads // kv_heads
