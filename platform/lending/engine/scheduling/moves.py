"""Running requests that change partitions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.lending.engine.scheduling.loan import Copy
from loomserve.platform.lending.engine.scheduling.partition_use import PartitionUse
from loomserve.platform.lending.policy.partition_choice import Resident
from loomserve.platform.lending.policy.partition_costs import PartitionCosts


class RequestMoves:
    """Moves running requests to other blocks, their KV copied. A moved request is preempted, and
    finds its full blocks in the target's prefix cache when it goes on there, in this very step or
    the next; the KV of the tokens behind them, fewer than a block, is computed again."""

    def __init__(self, engine: HookedScheduler, use: PartitionUse, costs: PartitionCosts) -> None:
        self.count = 0
        """Requests that were moved since the engine's start."""
        self._engine = engine
        self._use = use
        self._costs = costs
        self._moving: Request | None = None
        self._targets: dict[str, int] = {}

    def is_moving(self, request: Request) -> bool:
        """Whether the request is being preempted because it moves."""
        return request is self._moving

    def target_of(self, request: Request) -> int | None:
        return self._targets.get(request.request_id)

    def forget(self, request: Request) -> None:
        self._targets.pop(request.request_id, None)

    def resident(self, request: Request) -> Resident:
        blocks = len(self._use.table_of(request))
        return Resident(
            blocks=blocks,
            tokens=request.num_computed_tokens,
            copy_s=self._costs.copy_s(blocks),
            recompute_s=self._engine.costs.prefill_s(request.num_computed_tokens),
        )

    def move(self, request: Request, target: int, copy: Copy) -> bool:
        """Move a request, if the target has room and its ring has not closed."""
        size = self._engine.costs.block_size
        # A step in flight has computed its blocks before the worker comes to copy them.
        full = min(request.num_computed_tokens // size, len(request.block_hashes))
        if not self._copy(request, self._use.table_of(request)[:full], target, copy):
            return False
        self._moving = request
        self._engine.preempt(request)
        self._moving = None
        self._targets[request.request_id] = target
        self.count += 1
        return True

    def _copy(self, request: Request, table: Sequence[int], target: int, copy: Copy) -> bool:
        """Leave a copy of these blocks in the target's prefix cache; False if that is not to be."""
        pool, size, full = self._use.pool.block_pool, self._engine.costs.block_size, len(table)
        with self._use.pool.on(target):
            there, _ = self._use.cached_blocks(request, full * size, target)
            pool.touch(there)
            begin, cached = time.perf_counter(), len(there)
            if full - cached > self._use.free_on(target):
                pool.free_blocks(reversed(there))
                return False
            copies = pool.get_new_blocks(full - cached)
            pairs = [
                (block, copied.block_id)
                for block, copied in zip(table[cached:], copies, strict=True)
            ]
            done = not pairs or copy(pairs)
            if done:
                pool.cache_full_blocks(request, [*there, *copies], cached, full, size, 0)
                self._costs.saw_copy(len(pairs), time.perf_counter() - begin)
            pool.free_blocks([*reversed(copies), *reversed(there)])
        return bool(done)
