"""Running requests and free blocks of an engine's partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.lending.engine.block_partitions import (
    PartitionedKVCacheManager,
    PartitionedPool,
)


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
