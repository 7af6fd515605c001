"""A borrower's loans and partitions, as its scheduler sees them, and what it learns of lenders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.lending.engine.block_partitions import (
    OWN,
    PartitionedKVCacheManager,
    PartitionedPool,
)
from loomserve.platform.lending.engine.shards.migration import ShardMigration
from loomserve.platform.lending.policy.limits import LoanLimit, Observation, after
from loomserve.platform.lending.policy.partition_choice import PartitionCosts
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import RingStats


class PartitionUse:
    """View of one engine's scheduler by partition; it holds nothing itself."""

    def __init__(self, engine: HookedScheduler) -> None:
        self._engine = engine

    @property
    def pool(self) -> PartitionedPool:
        return self._manager.pool

    @property
    def _manager(self) -> PartitionedKVCacheManager:
        manager: PartitionedKVCacheManager = self._engine.kv_cache_manager
        return manager

    def partition_of(self, request: Request) -> int | None:
        return self._manager.partition_of(request)

    def free_on(self, partition: int) -> int:
        return self.pool.free_on(partition)

    def running_on(self, partition: int | None) -> list[Request]:
        return [each for each in self._engine.running if self.partition_of(each) == partition]

    def context_on(self, partition: int) -> int:
        return sum(request.num_computed_tokens for request in self.running_on(partition))

    def needed_on(self, partition: int) -> int:
        """Blocks that the next step of the requests running there needs beyond those they have."""
        budget, needed = self._engine.costs.step_tokens, 0
        for request in self._engine.running:
            computed = request.num_computed_tokens
            left = request.num_tokens + request.num_output_placeholders - computed
            tokens = min(left, budget)
            budget -= tokens
            if self.partition_of(request) == partition:
                has = len(self.table_of(request))
                needed += max(0, self._engine.costs.blocks(computed + tokens) - has)
        return needed

    def table_of(self, request: Request) -> Sequence[int]:
        table: Sequence[int] = self._manager.get_block_ids(request.request_id)[0]
        return table

    def holders(self, blocks: range) -> list[Request]:
        return [each for each in self._engine.running if self._holds(each, blocks)]

    def cached_blocks(self, request: Request, tokens: int, partition: int) -> tuple[list[Any], int]:
        """Blocks with the longest cached prefix of ``tokens`` there, and that prefix's tokens."""
        with self.pool.on(partition):
            (blocks,), cached, _ = self._manager.coordinator.find_longest_cache_hit(
                request.block_hashes, tokens
            )
        return blocks, cached

    def _holds(self, request: Request, blocks: range) -> bool:
        table = self.table_of(request)
        # A request's blocks are all in one partition; the table may be empty.
        return bool(table) and max(table) >= blocks.start and min(table) < blocks.stop


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
