"""A lender's part in its scheduler's steps: borrowers' memory is the tail of its own blocks.

What a borrower may use is withheld from the engine's own requests, block by block as they leave it.
When those run short, the borrower is asked for some of it, and given a bounded time; its loan is
closed if it does not answer. So an engine gets back what it lends within ``GIVE_BACK_S``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from loomserve.platform.engine.scheduler_calls import WorkerCall
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler, StepHooks
from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling.loan import PartitionUse
from loomserve.platform.lending.policy.layout import (
    Layout,
    Memory,
    borrower_blocks,
    lender_blocks,
    tail,
)
from loomserve.platform.lending.policy.limits import (
    IDLE,
    LenderStepTimes,
    LoanLimit,
    LoanPhase,
    Observation,
    Rules,
    ServedTime,
    after,
)
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.words import Closed, RingStats
from loomserve.platform.state.lending_options import LendingOptions

_JUDGE_EVERY_S = 0.5
GIVE_BACK_S = 1.0
"""A borrower that does not leave within this time loses the loan."""


@dataclass
class Lent:
    """Loan to one borrower: it has the first ``held`` of ``blocks``, and is to have ``target``."""

    name: str
    ring: LentRing
    blocks: range
    layout: Layout
    target: int
    held: int = 0
    taken_back: int = 0
    seen: RingStats | None = None
    asked_at: float | None = None
    """When the borrower was asked to give back; None while it is not."""


class LenderHooks(StepHooks):
    """Loans to borrowers of one engine, and what its scheduler does for them in each step."""

    def __init__(
        self,
        engine: HookedScheduler,
        partitions: Partitions,
        options: LendingOptions,
        config: KVCacheConfig,
    ) -> None:
        self.lent: dict[str, Lent] = {}
        """Open loans, by name."""
        self.plans: dict[str, Any] = {}
        """How operators are sliced while there are borrowers."""
        group = config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        by_head = config.kv_cache_layout == KVCacheLayout.LHBNC.name
        self._layout = Layout(
            len(group.layer_names), spec.page_size_bytes, by_head and spec.num_kv_heads > 1
        )
        self._engine = engine
        self._partitions = partitions
        self._options = options
        self._use = PartitionUse(engine)
        self._workers: WorkerCall | None = None
        self._judge_at = 0.0
        self._forget_borrowers()

    def _forget_borrowers(self) -> None:
        """Start over: what was learnt of borrowers that have left says nothing of the next."""
        self._served_time = ServedTime()
        self._tasks = 0
        most = self._lendable_blocks * self._engine.costs.block_size
        rules = Rules(
            most_tokens=most, step_tokens=max(1, most // 8), tpot_ratio=self._options.tpot_budget
        )
        self._limit = LoanLimit(rules, LoanPhase.OPEN, most, 0.0, 0.0)

    # Loans

    def room_for(self, borrower: Layout, wanted: int) -> tuple[range, int]:
        """Own blocks that may be lent next to a borrower that asks for ``wanted`` blocks, and how
        many of its blocks they hold."""
        first = min((lent.blocks.start for lent in self.lent.values()), default=self._own_end)
        left = self._lendable_blocks - (self._own_end - first)
        count = min(left, lender_blocks(self._layout, borrower, wanted))
        places = borrower_blocks(self._layout, borrower, count) if count > 0 else 0
        return range(first - count, first), places

    def prepare(self, workers: WorkerCall) -> None:
        self._workers = workers
        if not self.lent:
            self._forget_borrowers()

    def open(self, lent: Lent) -> None:
        self.lent[lent.name] = lent
        self._grant(lent)

    def end(self, lent: Lent) -> None:
        assert self._workers is not None, "a loan is prepared first"
        del self.lent[lent.name]
        lent.ring.shut(Closed.DRAINED)
        # Only then is nothing of the borrower's in this memory any more.
        self._workers("end_lending", str(lent.ring.path))
        self._use.pool.offer(lent.blocks)
        lent.ring.close()

    def on_idle(self) -> None:
        """Lend more while the engine has no requests; call it about once a second."""
        if not self.lent or self._engine.has_unfinished_requests():
            return
        self._tasks += 1
        self._judge(IDLE, time.perf_counter())
        self._balance(time.monotonic())

    # One step

    def before_schedule(self) -> bool:
        for lent in [each for each in self.lent.values() if each.ring.closed is not Closed.OPEN]:
            self.end(lent)
        if self.lent:
            self._balance(time.monotonic())
        return True

    def after_update(self, scheduled_tokens: int) -> None:
        if self.lent and scheduled_tokens:
            self._keep_to_budget(time.perf_counter())
        for lent in self.lent.values():
            # Requests may have left blocks that are a borrower's from now on.
            self._grant(lent)

    def _keep_to_budget(self, now: float) -> None:
        """Lend less while borrowers take too much of this engine's steps."""
        served_s, tasks = 0.0, 0
        for lent in self.lent.values():
            before, lent.seen = lent.seen, lent.ring.stats()
            if before is not None:
                grown = lent.seen.since(before)
                served_s += _served_in_steps_s(grown)
                tasks += grown.polled
        self._served_time.add(now - self._engine.step_began, served_s)
        self._tasks += tasks
        if now >= self._judge_at and (times := self._served_time.p99()) is not None:
            self._judge(times, now)

    def _judge(self, times: LenderStepTimes, now: float) -> None:
        self._judge_at = now + _JUDGE_EVERY_S
        before = self._limit.tokens
        held = sum(lent.held for lent in self.lent.values()) * self._engine.costs.block_size
        self._limit = after(
            self._limit,
            Observation(
                tasks=self._tasks,
                step_s=0.0,
                late_s=0.0,
                worst_wait_s=0.0,
                used_tokens=held,
                tpot_s=times.disturbed_s,
                undisturbed_tpot_s=times.undisturbed_s,
            ),
            now,
        )
        self._tasks = 0
        if self._limit.tokens < before:
            # What the borrowers so far took must not count against those that are left.
            self._served_time = ServedTime()

    @property
    def _lendable_blocks(self) -> int:
        return self._options.lend_bytes // self._engine.costs.block_bytes

    @property
    def _own_end(self) -> int:
        return self._partitions.ranges[OWN].stop

    def _balance(self, now: float) -> None:
        """Ask borrowers for what own requests lack; lend again what these no longer need."""
        for lent in self.lent.values():
            # Who has left in time has as much time for what is asked for next.
            self._take_back(lent, now)
        shall = tail(self._memory())
        for lent in reversed(self.lent.values()):
            # The loan that was opened last is the first to give back, and the last to get.
            others = sum(each.target for each in self.lent.values() if each is not lent)
            target = min(max(shall - others, 0), len(lent.blocks))
            if target < lent.target:
                lent.target, lent.asked_at = target, lent.asked_at or now
                self._take_back(lent, now)
            elif lent.asked_at is None:
                lent.target = target
            self._grant(lent)

    def _memory(self) -> Memory:
        most = min(
            sum(len(lent.blocks) for lent in self.lent.values()),
            self._limit.tokens // self._engine.costs.block_size,
        )
        lent_now = sum(lent.target for lent in self.lent.values())
        coming = sum(lent.held - lent.target for lent in self.lent.values() if lent.asked_at)
        free = self._use.free_on(OWN)
        return Memory(
            blocks=len(self._partitions.ranges[OWN]),
            tail_blocks=lent_now,
            most_tail_blocks=most,
            free_blocks=free + coming,
            queued_blocks=self._queued_blocks(),
        )

    def _queued_blocks(self) -> int:
        """What the engine's next steps need: of requests that run, and of the first that waits."""
        # One more each, so that the next is there before it is needed.
        needed = self._use.needed_on(OWN) + len(self._use.running_on(OWN))
        first = next(iter(self._engine.waiting), None)
        return needed + (self._engine.costs.blocks(first.num_tokens) if first is not None else 0)

    def _take_back(self, lent: Lent, now: float) -> None:
        if lent.asked_at is None:
            return
        kept = borrower_blocks(self._layout, lent.layout, lent.target)
        if not lent.ring.recall(kept) and lent.ring.closed is Closed.OPEN:
            if now - lent.asked_at < GIVE_BACK_S:
                return
            lent.ring.shut(Closed.REVOKED)
        lent.taken_back += max(0, lent.held - lent.target)
        # Own requests may still use some of its target.
        lent.asked_at, lent.held = None, min(lent.held, lent.target)
        lent.ring.granted = borrower_blocks(self._layout, lent.layout, lent.held)
        self._use.pool.offer(lent.blocks[lent.target :])

    def _grant(self, lent: Lent) -> None:
        """Give the borrower the blocks from the beginning that nobody else has."""
        if lent.asked_at is not None or lent.held == lent.target:
            return
        self._use.pool.withhold(lent.blocks[: lent.target])
        queue = self._use.pool.queue
        lent.held = next(
            (i for i, block in enumerate(lent.blocks[: lent.target]) if not queue.is_kept(block)),
            lent.target,
        )
        lent.ring.wanted = borrower_blocks(self._layout, lent.layout, lent.target)
        lent.ring.granted = borrower_blocks(self._layout, lent.layout, lent.held)


def _served_in_steps_s(grown: RingStats) -> float:
    """Seconds of all service that stood between the lender's own operators."""
    if not grown.polled:
        return 0.0
    return grown.service_ns / 1e9 * grown.polled / (grown.polled + grown.idled)
