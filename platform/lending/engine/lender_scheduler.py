"""The scheduler's part of lending: guests' memory is the tail of the engine's own blocks.

What a guest may use is withheld from the engine's own requests, block by block as they leave it.
When those run short, the guest is asked for a part of it, and given a bounded time; its loan is
closed if it does not answer. So an engine gets back what it lends within ``GIVE_BACK_S``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.borrower_scheduler import BorrowingScheduler, WorkerCall
from loomserve.platform.lending.messages import LentReport, SlicingReport
from loomserve.platform.lending.policy.boundary import Memory, tail
from loomserve.platform.lending.policy.budget import IDLE, LenderStepTimes, ServedTime
from loomserve.platform.lending.policy.layout import Layout, borrower_blocks, lender_blocks
from loomserve.platform.lending.policy.limits import LoanLimit, LoanPhase, Observation, Rules, after
from loomserve.platform.lending.policy.slicing import SlicingPlan
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.ring import Closed, Ring, RingStats
from loomserve.platform.state.lending_options import LendingOptions, ShardSpec

_JUDGE_EVERY_S = 0.5
GIVE_BACK_S = 1.0
"""A borrower that does not leave within this time loses the loan."""


@dataclass
class Lent:
    """A loan to one borrower: ``target`` blocks from the beginning of ``blocks`` shall be its."""

    name: str
    ring: Ring
    blocks: range
    guest: Layout
    target: int
    held: int = 0
    taken_back: int = 0
    seen: RingStats | None = None
    asked_at: float | None = None


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> LendingScheduler:
    """What ``scheduler_cls`` names for an engine that lends or borrows."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = AsyncLendingScheduler if asynchronous else LendingScheduler
    return kind(vllm_config=vllm_config, **kwargs)


class LendingScheduler(BorrowingScheduler):
    """Withholds from its own requests what guests may use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lent: dict[str, Lent] = {}
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        layers = len(self.kv_cache_config.kv_cache_groups[0].layer_names)
        self._layout = Layout(layers, spec.page_size_bytes)
        self._judge_at = 0.0
        self._plans: dict[str, Any] = {}
        self._forget_guests()

    def _forget_guests(self) -> None:
        """What was learnt of those that have left says nothing of the next."""
        self._guest_time = ServedTime()
        self._tasks = 0
        most = self.lending.lend_bytes // self._block_bytes * self.block_size
        rules = Rules(
            most_tokens=most,
            step_tokens=max(1, most // 8),
            tpot_ratio=self.lending.tpot_budget,
        )
        self._limit = LoanLimit(rules, LoanPhase.OPEN, most, 0.0, 0.0)

    # Calls

    def lend(self, workers: WorkerCall, name: str, path: str, guest: dict[str, Any]) -> int:
        """Open a loan, as large as the guest asks or as there is left to lend.

        Args:
            name: the loan's.
            path: of the ring that is made for it.
            guest: what :meth:`BorrowingScheduler.borrowing` says of the guest.

        Returns:
            How many of the guest's blocks it may come to hold.

        Raises:
            ValueError: too little is left to lend, or this engine borrows itself.
        """
        if self.loans:
            raise ValueError("it borrows just now, and its guests would wait for its own lender")
        geometry = Geometry.from_json(guest["geometry"])
        layout = Layout(geometry.layers, geometry.layer_block_bytes)
        first = min((lent.blocks.start for lent in self.lent.values()), default=self._own_end)
        left = self.lending.lend_bytes // self._block_bytes - (self._own_end - first)
        count = min(left, lender_blocks(self._layout, layout, guest["blocks"]))
        places = borrower_blocks(self._layout, layout, count) if count > 0 else 0
        if places < (least := guest["least"]):
            raise ValueError(
                f"there is room for {places} of the guest's blocks, which are {least} at least: "
                "raise lending.lend_memory of this model"
            )
        blocks = range(first - count, first)
        self._workers = workers
        if not self.lent:
            self._forget_guests()
        workers("lend", path, blocks.start, count, guest)
        self._plans = workers("slicing_plans")
        self.lent[name] = Lent(name, Ring.attach(Path(path)), blocks, layout, count)
        self._grant(self.lent[name])
        return places

    def borrow(
        self, workers: WorkerCall, name: str, path: str, part: ShardSpec | None = None
    ) -> int:
        if self.lent:
            raise ValueError("it lends just now, and its guests would wait for its own lender")
        return super().borrow(workers, name, path, part)

    def end_lending(self, workers: WorkerCall, name: str) -> None:
        """Take everything back at once; the borrower computes elsewhere what it had here."""
        lent = self.lent.pop(name, None)
        if lent is None:
            return
        lent.ring.shut(Closed.DRAINED)
        # Only then is nothing of the guest's in this memory any more.
        workers("end_lending", str(lent.ring.path))
        self._pool.offer(lent.blocks)
        lent.ring.close()

    def rest(self, workers: WorkerCall) -> None:
        """Lend more again while there is nothing to do here.

        To be called about once a second, as an engine without requests does not schedule.
        """
        if not self.lent or self.has_unfinished_requests():
            return
        self._tasks += 1
        self._judge(IDLE, time.perf_counter())
        self._balance(time.monotonic())

    def look_for_tasks(self, workers: WorkerCall, polling: str) -> dict[str, Any]:
        """Look for guests' tasks here from now on (``lending.polling``); what was planned."""
        given = {**self.lending.model_dump(), "polling": polling}
        self.lending = LendingOptions.model_validate(given)
        self._plans = workers("look_for_tasks", polling)
        return self._plans

    def lent_state(self, workers: WorkerCall) -> list[dict[str, Any]]:
        """A :class:`LentReport` of each loan, as JSON."""
        return [self._lent_report(lent).model_dump() for lent in self.lent.values()]

    def _lent_report(self, lent: Lent) -> LentReport:
        stats = lent.ring.stats()
        return LentReport(
            name=lent.name,
            blocks=lent.held,
            most_blocks=len(lent.blocks),
            taken_back_blocks=lent.taken_back,
            closed=lent.ring.closed.name,
            slicing={kind: _slicing(SlicingPlan(**plan)) for kind, plan in self._plans.items()},
            polled=stats.polled,
            idled=stats.idled,
            service_ns=stats.service_ns,
            pickup_ns=stats.pickup_ns,
        )

    # One step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for lent in [each for each in self.lent.values() if each.ring.closed is not Closed.OPEN]:
            self.end_lending(self._workers, lent.name)
        if self.lent:
            self._balance(time.monotonic())
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args)
        if self.lent and scheduler_output.total_num_scheduled_tokens:
            self._keep_to_budget(time.perf_counter())
        for lent in self.lent.values():
            # Requests may have left blocks that are a guest's from now on.
            self._grant(lent)
        return outputs

    def _keep_to_budget(self, now: float) -> None:
        """Lend less while guests take too much of this engine's steps."""
        served_s, tasks = 0.0, 0
        for lent in self.lent.values():
            before, lent.seen = lent.seen, lent.ring.stats()
            if before is not None:
                served_s += _served_in_steps_s(before, lent.seen)
                tasks += lent.seen.polled - before.polled
        self._guest_time.add(now - self._step_began, served_s)
        self._tasks += tasks
        if now >= self._judge_at and (times := self._guest_time.p99()) is not None:
            self._judge(times, now)

    def _judge(self, times: LenderStepTimes, now: float) -> None:
        self._judge_at = now + _JUDGE_EVERY_S
        before = self._limit.tokens
        held = sum(lent.held for lent in self.lent.values()) * self.block_size
        self._limit = after(
            self._limit,
            Observation(
                tasks=self._tasks,
                step_s=0.0,
                late_s=0.0,
                worst_wait_s=0.0,
                timed_out=False,
                used_tokens=held,
                tpot_s=times.disturbed_s,
                undisturbed_tpot_s=times.undisturbed_s,
            ),
            now,
        )
        self._tasks = 0
        if self._limit.tokens < before:
            # What the guests of before took shall not count against those that are left.
            self._guest_time = ServedTime()

    @property
    def _own_end(self) -> int:
        return self._sides.ranges[OWN].stop

    def _balance(self, now: float) -> None:
        """Ask guests for what own requests lack; lend again what these no longer need."""
        shall = tail(self._memory())
        for lent in reversed(self.lent.values()):
            # The loan that was opened last is the first to give back, and the last to get.
            others = sum(each.target for each in self.lent.values() if each is not lent)
            target = min(max(shall - others, 0), len(lent.blocks))
            if target < lent.target:
                lent.asked_at = lent.asked_at or now
            elif lent.asked_at is not None:
                target = lent.target
            lent.target = target
            self._take_back(lent, now)
            self._grant(lent)

    def _memory(self) -> Memory:
        most = min(
            sum(len(lent.blocks) for lent in self.lent.values()),
            self._limit.tokens // self.block_size,
        )
        lent_now = sum(lent.target for lent in self.lent.values())
        coming = sum(lent.held - lent.target for lent in self.lent.values() if lent.asked_at)
        free = self._pool.free_block_queue.free_on(OWN)
        return Memory(
            blocks=len(self._sides.ranges[OWN]),
            tail_blocks=lent_now,
            most_tail_blocks=most,
            free_blocks=free + coming,
            queued_blocks=self._queued_blocks(),
            # Their wishes are not known; what is free here is better lent than idle.
            wanted_blocks=most,
            used_blocks=0,
        )

    def _queued_blocks(self) -> int:
        """What the engine's next steps need: of requests that run, and of the first that waits."""
        # One more each, so that the next is there before it is needed.
        needed = self._needed_on(OWN) + len(self._running_on(OWN))
        first = next(iter(self.waiting), None)
        return needed + (self._blocks_for(first.num_tokens) if first is not None else 0)

    def _take_back(self, lent: Lent, now: float) -> None:
        if lent.asked_at is None:
            return
        kept = borrower_blocks(self._layout, lent.guest, lent.target)
        lent.ring.wanted = kept
        if lent.ring.vacated > kept and lent.ring.closed is Closed.OPEN:
            if now - lent.asked_at < GIVE_BACK_S:
                return
            lent.ring.shut(Closed.REVOKED)
        lent.ring.granted = kept
        lent.taken_back += max(0, lent.held - lent.target)
        lent.asked_at, lent.held = None, lent.target
        self._pool.offer(lent.blocks[lent.target :])

    def _grant(self, lent: Lent) -> None:
        """Give the guest the blocks from the beginning that nobody else has."""
        if lent.asked_at is not None or lent.held == lent.target:
            return
        self._pool.withhold(lent.blocks[: lent.target])
        queue = self._pool.free_block_queue
        lent.held = next(
            (i for i, block in enumerate(lent.blocks[: lent.target]) if not queue.is_kept(block)),
            lent.target,
        )
        lent.ring.wanted = borrower_blocks(self._layout, lent.guest, lent.target)
        lent.ring.granted = borrower_blocks(self._layout, lent.guest, lent.held)


def _slicing(plan: SlicingPlan) -> SlicingReport:
    return SlicingReport(
        slices=dict(plan.slices),
        wait_before_s=plan.wait_before_s,
        wait_after_s=plan.wait_after_s,
    )


def _served_in_steps_s(before: RingStats, now: RingStats) -> float:
    """Of all service, the part that stood between the lender's own operators."""
    polled, idled = now.polled - before.polled, now.idled - before.idled
    if not polled:
        return 0.0
    return (now.service_ns - before.service_ns) / 1e9 * polled / (polled + idled)


class AsyncLendingScheduler(LendingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same with a step in flight while the next is scheduled."""
