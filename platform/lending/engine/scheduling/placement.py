"""The partition on which a request starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.request import Request

from loomserve.kvstore.engine.request_keys import hands_over
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling.loan import Loan
from loomserve.platform.lending.engine.scheduling.moves import RequestMoves
from loomserve.platform.lending.engine.scheduling.partition_use import PartitionUse
from loomserve.platform.lending.policy.partition_choice import PLACEMENTS, Arrival, Partition
from loomserve.platform.lending.policy.partition_costs import PartitionCosts
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
