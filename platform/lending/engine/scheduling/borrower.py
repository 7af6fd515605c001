"""A borrower's part in its scheduler's steps: requests whose KV lies with lenders.

A loan is a partition of the block address space (:mod:`block_partitions`). What of it may be used
changes as the lender gives and takes (control words of
:class:`loomserve.platform.lending.ring.ring.Ring`), and it ends at once when its ring closes:
requests that lived there are preempted and computed elsewhere, and the output of the failed step is
dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from loomserve.kvstore.engine.request_keys import hands_over
from loomserve.platform.engine.scheduler_calls import WorkerCall
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler, StepHooks
from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling.loan import Loan, PartitionUse, observe
from loomserve.platform.lending.engine.scheduling.placement import RequestMoves, RequestPlacement
from loomserve.platform.lending.engine.shards.migration import MigrationPhase, ShardMigration
from loomserve.platform.lending.policy.limits import LoanPhase
from loomserve.platform.lending.policy.partition_choice import PartitionCosts, move
from loomserve.platform.lending.ring.words import Closed
from loomserve.platform.state.lending_options import LendingOptions


class HomeReason(StrEnum):
    """Why a shard comes home."""

    REQUESTED = "it was told to"
    SLOW = "its lender was too slow"
    RECALLED = "its lender wanted memory or time back"


class BorrowerHooks(StepHooks):
    """Open loans of one engine, and what its scheduler does for them in each step."""

    def __init__(
        self,
        engine: HookedScheduler,
        partitions: Partitions,
        options: LendingOptions,
        config: KVCacheConfig,
        *,
        prefix_caching: bool,
    ) -> None:
        self.loans: dict[int, Loan] = {}
        """Open loans, by partition."""
        self.broken: Counter[Closed] = Counter()
        """Loans that ended by themselves, by reason."""
        self.partitions = partitions
        self.use = PartitionUse(engine)
        costs = PartitionCosts()
        self.moves = RequestMoves(engine, self.use, costs)
        self.placement = RequestPlacement(
            engine, partitions, options, self.loans, self.use, self.moves, costs
        )
        self._engine = engine
        self._costs = costs
        self._workers: WorkerCall | None = None
        self._leaving: Request | None = None
        self._moves_requests = options.move and prefix_caching
        self._kv_heads = int(config.kv_cache_groups[0].kv_cache_spec.num_kv_heads)

    # Loans

    def open(self, loan: Loan, workers: WorkerCall) -> None:
        self._workers = workers
        self.loans[loan.partition] = loan
        self.follow(loan)

    def drain(self, loan: Loan) -> bool:
        """Start nothing there any more; returns whether nothing is left there. Requests for which
        another partition has room move there at once. A shard that is there comes home."""
        loan.open = False
        if loan.shard is not None:
            self.follow(loan)
            return loan.shard.phase is MigrationPhase.HOME
        for request in self.use.running_on(loan.partition):
            self._move_from(loan.partition, [request], 1)
        return not self.use.running_on(loan.partition)

    def end(self, loan: Loan) -> None:
        """Compute elsewhere what is left there, and forget the loan."""
        # A step in flight computes nothing right of what is there.
        if loan.shard is None:
            self._resize(loan, 0, drop_output=True)
        else:
            self._lose(loan.shard)
        del self.loans[loan.partition]
        self._costs.forget(loan.partition)
        loan.ring.close()

    def follow(self, loan: Loan) -> None:
        """Use what the lender grants and does not want back."""
        if loan.ring.closed is not Closed.OPEN:
            self._end_broken(loan)
            return
        if loan.shard is not None:
            self._follow_shard(loan, loan.shard)
            return
        if loan.limit.phase is LoanPhase.EJECT:
            for request in self.use.running_on(loan.partition):
                self._preempt(request)
        granted = min(loan.ring.claim(), len(loan.blocks))
        usable = granted if loan.most is None else min(granted, loan.most)
        if usable != loan.usable:
            self._resize(loan, usable)
        # The lender knows nothing of our own limit, and may keep for us what lies beyond it.
        if granted != loan.ring.vacated:
            loan.ring.vacated = granted

    def follow_idle(self) -> None:
        """Move shards on while nothing runs, and so no step does it."""
        if self._engine.running:
            return
        for loan in [each for each in self.loans.values() if each.shard is not None]:
            self.follow(loan)

    # One step

    def before_schedule(self) -> bool:
        for loan in list(self.loans.values()):
            self.follow(loan)
        # Those of the lowest priority, as of now, are the first to leave.
        self._engine.sort_running()
        return not self._make_room()

    def before_update(self, scheduled_tokens: int) -> None:
        for loan in list(self.loans.values()):
            if loan.ring.closed is not Closed.OPEN:
                self._end_broken(loan)
        if scheduled_tokens:
            now = time.perf_counter()
            step_s = now - self._engine.step_began
            self._costs.saw_step(step_s)
            for loan in self.loans.values():
                observe(loan, self.use, self._costs, self._kv_heads, step_s, now)

    def in_own_memory(self, request: Request) -> bool:
        # The memory of a request that leaves may be given back before the step that would save it.
        return self.use.partition_of(request) == OWN and request is not self._leaving

    def keeps_kv(self, request: Request) -> bool:
        return self.moves.is_moving(request)

    def on_free(self, request: Request) -> None:
        self.moves.forget(request)

    def _make_room(self) -> bool:
        """Move or preempt in each partition what its running requests' next blocks do not fit in.
        vLLM would preempt the last of all running requests, which may be of another partition.
        Returns whether any was preempted."""
        preempted = False
        for partition in range(len(self.partitions.ranges)):
            while (missing := self.use.needed_on(partition) - self.use.free_on(partition)) > 0:
                here = self.use.running_on(partition)[::-1]
                if not self._move_from(partition, here, missing):
                    self._preempt(here[0])
                    preempted = True
        return preempted

    def _follow_shard(self, loan: Loan, shard: ShardMigration) -> None:
        granted = loan.ring.claim()
        if not loan.open:
            shard.come_home(HomeReason.REQUESTED)
        elif loan.limit.phase is LoanPhase.EJECT:
            shard.come_home(HomeReason.SLOW)
        elif not shard.fits(loan.ring.wanted):  # else it waits for what its lender still uses
            shard.come_home(HomeReason.RECALLED)
        self._leave(shard.use(granted), loan)
        running = bool(self._engine.running)
        if shard.advance(granted, self._costs.step_s, running):
            self._leave(shard.use(granted), loan)
            loan.ring.vacated = shard.has
        else:
            self._end_broken(loan)

    def _leave(self, gone: range, loan: Loan) -> None:
        """Move requests that hold any of these blocks to others of own memory, or preempt them."""
        for request in self.use.holders(gone):
            if not self.moves.move(
                request, OWN, lambda pairs: self._call("shard", "copy", loan.partition, pairs)
            ):
                self._leaving = request
                self._preempt(request)
                self._leaving = None

    def _end_broken(self, loan: Loan) -> None:
        self.broken[loan.ring.closed] += 1
        self.end(loan)

    def _lose(self, shard: ShardMigration) -> None:
        if shard.away:
            for request in self.use.running_on(OWN):
                self._preempt(request, drop_output=True)
            shard.use(0)
        shard.lose()

    def _resize(self, loan: Loan, usable: int, *, drop_output: bool = False) -> None:
        """Let the first ``usable`` blocks of the loan be used, and no others. ``drop_output``: of a
        step in flight nothing of these requests is right."""
        first = loan.blocks.start
        if usable < loan.usable:
            gone = range(first + usable, loan.blocks.stop)
            for request in self.use.holders(gone):
                if drop_output or not self._move_from(loan.partition, [request], 1):
                    self._preempt(request, drop_output=drop_output)
            self.use.pool.withhold(gone)
        else:
            self.use.pool.offer(range(first + loan.usable, first + usable))
        loan.usable = usable

    def _preempt(self, request: Request, *, drop_output: bool = False) -> None:
        self.moves.forget(request)
        self._engine.preempt(request, drop_output=drop_output)

    def _move_from(self, partition: int, requests: Sequence[Request], missing_blocks: int) -> bool:
        """Move one of the requests, which are in the order in which they would be preempted.
        Returns whether one was moved, and so none need be preempted."""
        if not self._moves_requests or not self.loans or self._shard_is_away:
            return False
        # What passes through the KV store is copied from and to this engine's memory.
        requests = [each for each in requests if not hands_over(each)]
        residents = [self.moves.resident(each) for each in requests]
        chosen = move(self.placement.partitions(None), residents, partition, missing_blocks)
        return chosen is not None and self.moves.move(
            requests[chosen.request],
            chosen.partition,
            lambda pairs: self._call("move_blocks", partition, chosen.partition, pairs),
        )

    @property
    def _shard_is_away(self) -> bool:
        """Whether own blocks are of another shape than a lender's."""
        return any(loan.shard is not None and loan.shard.away for loan in self.loans.values())

    def _call(self, method: str, *given: object) -> bool:
        assert self._workers is not None, "a loan is opened first"
        return bool(self._workers(method, *given))
