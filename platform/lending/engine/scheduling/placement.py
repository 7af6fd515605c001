"""The partition on which a request starts, and running requests that change partitions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.request import Request

from loomserve.kvstore.engine.request_keys import hands_over
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling.loan import Copy, Loan, PartitionUse
from loomserve.platform.lending.policy.partition_choice import (
    PLACEMENTS,
    Arrival,
    Partition,
    PartitionCosts,
    Resident,
)
from loomserve.platform.state.lending_options import LendingOptions


@dataclass
class RequestPlacement:
    """Starts each request in own memory or with a lender, by the policy of its options."""

    engine: HookedScheduler
    space: Partitions
    options: LendingOptions
    loans: Mapping[int, Loan]
    use: PartitionUse
    moves: RequestMoves
    costs: PartitionCosts

    @property
    def own_blocks(self) -> int:
        """Blocks of own memory, with those that shards which are away leave room for."""
        more = sum(loan.shard.usable for loan in self.loans.values() if loan.shard is not None)
        return len(self.space.ranges[OWN]) + more

    def start_on(self, request: Request) -> int | None:
        """Partition on which the request starts; None: it has to wait."""
        if not self.loans or self.engine.is_swapped_out(request) or hands_over(request):
            return OWN
        moved = self.moves.target_of(request)
        if moved is not None:
            there = self._partition(moved, request)
            if there.allowed and there.needed_blocks <= there.free_blocks:
                return moved
        arrival = Arrival(
            self.partitions(request),
            request.num_tokens,
            self.costs.rest_s(self.use.context_on(OWN)),
        )
        place = PLACEMENTS[self.options.placement](arrival, self.options.lent_share)
        # A request that waits alone would wait for ever.
        return OWN if place is None and not self.engine.running else place

    def partitions(self, request: Request | None) -> list[Partition]:
        """All partitions, with what the request needs there, if one arrives."""
        return [self._partition(at, request) for at in range(len(self.space.ranges))]

    def _partition(self, partition: int, request: Request | None) -> Partition:
        loan = self.loans.get(partition)
        here = self.use.running_on(partition)
        costs = self.engine.costs
        needed = tokens = 0
        if request is not None:
            tokens = request.num_tokens
            _, cached = self.use.cached_blocks(request, tokens - 1, partition)
            needed = costs.blocks(tokens - cached)
        growth = [self.engine.most_blocks(one) - costs.blocks(one.num_tokens) for one in here]
        lent = loan.usable if loan else 0
        return Partition(
            blocks=self.own_blocks - 1 if partition == OWN else lent,
            free_blocks=self.use.free_on(partition),
            needed_blocks=needed,
            requests=len(here),
            tokens=self.use.context_on(partition),
            token_s=self.costs.token_s,
            handoff_s=self.costs.handoff_s(partition),
            allowed=partition == OWN or (loan is not None and self._may_start(loan, tokens)),
            growth_blocks=sum(growth) / len(growth) if growth else None,
        )

    def _may_start(self, loan: Loan, tokens: int) -> bool:
        if not loan.open or loan.shard is not None or self.options.placement == "local":
            return False
        if self.options.placement == "ratio":
            return True
        return self.use.context_on(loan.partition) + tokens <= loan.limit.tokens


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
