"""The scheduler's part of borrowing: requests whose KV lies with lenders.

A loan is a side of the block address space (:mod:`block_sides`). What of it may be used changes as
the lender gives and takes (:class:`loomserve.platform.lending.ring.ring.Ring`'s control words), and
it ends at once when its ring closes: requests that lived there are then preempted and computed
elsewhere, and what the failed step made of them is dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from loomserve.kvstore.engine.request_keys import hands_over
from loomserve.platform.engine import scheduler_calls
from loomserve.platform.engine.kv_blocks import block_bytes
from loomserve.platform.engine.scheduler import AdaptiveScheduler
from loomserve.platform.lending.engine.block_partitions import (
    OWN,
    SidedBlockPool,
    SidedKVCacheManager,
    borrowed_sides,
)
from loomserve.platform.lending.engine.shards.migration import PartLoan
from loomserve.platform.lending.engine.shards.migration import Phase as PartPhase
from loomserve.platform.lending.messages import BorrowerReport, LoanReport, ShardReport
from loomserve.platform.lending.policy.limits import (
    LoanLimit,
    LoanPhase,
    Observation,
    Rules,
    after,
    first,
)
from loomserve.platform.lending.policy.partition_choice import (
    PLACEMENTS,
    Arrival,
    Partition,
    Resident,
    move,
)
from loomserve.platform.lending.policy.partition_costs import PartitionCosts
from loomserve.platform.lending.ring.ring import Closed, Ring, RingStats
from loomserve.platform.state.lending_options import LENDING_CONFIG, LendingOptions, ShardSpec

_PROBE_BLOCKS = 8
"""Of context, with which a lender that nothing is known of is tried."""
_SMOOTHING = 0.1

WorkerCall = Callable[..., Any]
"""Calls a method of the engine's worker: its name, and what it is given."""
Copy = Callable[[list[tuple[int, int]]], bool]
"""Copies each pair's first block onto its second; False if a lender's ring has closed."""


@dataclass
class Loan:
    """What lies with one lender: ``usable`` blocks from the beginning of ``blocks``."""

    name: str
    side: int
    ring: Ring
    blocks: range
    seen: RingStats
    use: LoanLimit
    usual_delay_s: float = 0.0
    part: PartLoan | None = None
    """If part of all requests' attention lies there, and no request as a whole."""
    layers: bool = False
    """If that part is layers, which compute more than attention."""
    usable: int = 0
    most: int | None = None
    """Blocks that may be used however many the lender grants."""
    open: bool = True
    """Whether requests may start there, or the part may stay."""


class BorrowingScheduler(AdaptiveScheduler):
    """Serves requests from its own memory and from that of lenders."""

    kv_cache_manager: SidedKVCacheManager
    _workers: WorkerCall
    """There since the first loan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lending = LendingOptions.model_validate(
            self.vllm_config.additional_config[LENDING_CONFIG]
        )
        self.loans: dict[int, Loan] = {}
        self.broken: Counter[Closed] = Counter()
        """Loans that ended by themselves, by reason."""
        self._sides = borrowed_sides(self.kv_cache_config, self.lending)
        self._costs = PartitionCosts()
        self._step_began = 0.0
        self._moving: Request | None = None
        self._moved: dict[str, int] = {}
        """Of requests that have moved, the side on which they go on."""
        self._moves = 0
        SidedKVCacheManager.divide(self.kv_cache_manager, self._sides, self._start_on)
        for side in self._sides.ranges[1:]:
            self._pool.withhold(side)
        scheduler_calls.serve(self)

    @property
    def _pool(self) -> SidedBlockPool:
        return self.kv_cache_manager.block_pool

    def in_own_memory(self, request: Request) -> bool:
        return self.kv_cache_manager.side_of(request) == OWN

    # Calls

    def borrowing(self, workers: WorkerCall, part: ShardSpec | None = None) -> dict[str, Any]:
        """What a lender must know of this engine, or of part of it."""
        return dict(workers("borrowing", part))

    def borrow(
        self, workers: WorkerCall, name: str, path: str, part: ShardSpec | None = None
    ) -> int:
        """Use a loan that its lender has opened.

        Args:
            name: the loan's, for whoever looks at this engine.
            path: of its ring.
            part: moves there of all requests while steps run; None: whole requests start there.

        Returns:
            The side on which its blocks are.

        Raises:
            ValueError: no side is free, or that part of this engine cannot move.
        """
        self._check(part)
        free = set(range(1, len(self._sides.ranges))) - self.loans.keys()
        if not free:
            raise ValueError(
                f"{len(self.loans)} loans are open, and lending.lenders allows no more"
            )
        side = min(free)
        self._workers = workers
        ring = Ring.attach(Path(path))
        moving = None
        if part:
            room = workers("begin_shard", side, path, part)
            size = ring.geometry.layers * ring.geometry.layer_block_bytes
            moving = PartLoan(self._pool, self._sides, side, room, size, workers)
        else:
            workers("borrow", side, path)
        blocks = self._sides.ranges[side]
        rules = Rules(
            most_tokens=len(blocks) * self.block_size,
            step_tokens=self.block_size * _PROBE_BLOCKS,
            stall_s=self.lending.patience_ms / 2000,
        )
        use = first(rules, time.perf_counter())
        self.loans[side] = Loan(
            name, side, ring, blocks, ring.stats(), use,
            part=moving, layers=part is not None and "layers" in part,
        )  # fmt: skip
        self._follow(self.loans[side])
        return side

    def limit_loan(self, workers: WorkerCall, side: int, most_bytes: int | None) -> None:
        """Use no more of a loan than so many bytes; None: all that the lender grants.

        What lies beyond moves where there is room, or is computed again.
        """
        if side in self.loans:  # else it has just ended by itself
            blocks = None if most_bytes is None else most_bytes // block_bytes(self.kv_cache_config)
            self.loans[side].most = blocks
            self._follow(self.loans[side])

    def drain_loan(self, workers: WorkerCall, side: int) -> bool:
        """Start no request there any more; returns whether none is left there.

        Those for which another side has room move there at once. A part that is there comes home.
        """
        if side not in self.loans:  # it has just ended by itself
            return True
        self.loans[side].open = False
        if (part := self.loans[side].part) is not None:
            self._follow(self.loans[side])
            return part.phase is PartPhase.HOME
        for request in self._running_on(side):
            self._move_from(side, [request], 1)
        return not self._running_on(side)

    def end_loan(self, workers: WorkerCall, side: int) -> None:
        """Compute what is left there elsewhere, and forget the loan, whatever its state."""
        if side in self.loans:
            self._end(self.loans[side])
        workers("end_loan", side)

    def loan_state(self, workers: WorkerCall) -> dict[str, Any]:
        """A :class:`BorrowerReport` as JSON."""
        if not self.running:  # and so no step that would do it
            for loan in [each for each in self.loans.values() if each.part is not None]:
                self._follow(loan)
        return BorrowerReport(
            own_blocks=self._own_blocks,
            own_free_blocks=self._pool.free_block_queue.free_on(OWN),
            moved=self._moves,
            broken={reason.name: count for reason, count in self.broken.items()},
            loans=tuple(map(self._report, self.loans.values())),
        ).model_dump()

    def _report(self, loan: Loan) -> LoanReport:
        stats = loan.ring.stats()
        return LoanReport(
            name=loan.name,
            partition=loan.side,
            usable_blocks=loan.usable,
            free_blocks=self._pool.free_block_queue.free_on(loan.side),
            requests=len(self._running_on(loan.side)),
            open=loan.open,
            phase=str(loan.use.phase),
            shard=ShardReport(**loan.part.state()) if loan.part is not None else None,
            most_tokens=loan.use.tokens,
            tasks=stats.tasks,
            post_ns=stats.post_ns,
            wait_ns=stats.wait_ns,
            wait_max_ns=stats.wait_max_ns,
            pickup_ns=stats.pickup_ns,
            service_ns=stats.service_ns,
        )

    # One step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for loan in list(self.loans.values()):
            self._follow(loan)
        # Those of the lowest priority, as of now, are the first to leave.
        self._put_running_in_order(time.time())
        preempted = self._make_room()
        self._step_began = time.perf_counter()
        with self._nobody_starting() if preempted else nullcontext():
            return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        for loan in list(self.loans.values()):
            if loan.ring.closed is not Closed.OPEN:
                self._end_broken(loan)
        if scheduler_output.total_num_scheduled_tokens:
            self._observe()
        return super().update_from_output(scheduler_output, *args)

    def _follow(self, loan: Loan) -> None:
        """Use what the lender grants and does not want back."""
        if loan.ring.closed is not Closed.OPEN:
            self._end_broken(loan)
            return
        if loan.part is not None:
            self._follow_part(loan, loan.part)
            return
        if loan.use.phase is LoanPhase.EJECT:
            for request in self._running_on(loan.side):
                self._preempt(request)
        granted = min(loan.ring.granted, loan.ring.wanted, len(loan.blocks))
        usable = granted if loan.most is None else min(granted, loan.most)
        if usable != loan.usable:
            self._use(loan, usable)
        # The lender knows nothing of our own limit, and may keep for us what lies beyond it.
        if granted != loan.ring.vacated:
            loan.ring.vacated = granted

    def _follow_part(self, loan: Loan, part: PartLoan) -> None:
        """Move it, or let it come home; use as many more blocks as the lender has room for."""
        granted = min(loan.ring.granted, loan.ring.wanted)
        if not loan.open:
            part.come_home("it was told to")
        elif loan.use.phase is LoanPhase.EJECT:
            part.come_home("its lender was too slow")
        elif not part.fits(loan.ring.wanted):  # else it waits for what its lender still uses
            part.come_home("its lender wanted memory or time back")
        self._leave(part.use(granted), loan)
        if part.advance(loan.ring.granted, self._costs.step_s, bool(self.running)):
            self._leave(part.use(granted), loan)
            loan.ring.vacated = part.has
        else:
            self._end_broken(loan)

    def _leave(self, gone: range, loan: Loan) -> None:
        """Requests that hold any of these blocks go on in others of the same side, or later."""
        for request in [each for each in self.running if self._holds(each, gone)]:
            if not self._move(
                request, OWN, lambda pairs: self._workers("copy_in_shard", loan.side, pairs)
            ):
                self._preempt(request)

    def _end_broken(self, loan: Loan) -> None:
        self.broken[loan.ring.closed] += 1
        self._end(loan)

    def _end(self, loan: Loan) -> None:
        # A step in flight computes nothing right of what is there.
        if loan.part is None:
            self._use(loan, 0, drop_output=True)
        else:
            self._lose(loan.part)
        del self.loans[loan.side]
        self._costs.forget(loan.side)
        loan.ring.close()

    def _lose(self, part: PartLoan) -> None:
        if part.away:
            for request in self._running_on(OWN):
                self._preempt(request, drop_output=True)
            part.use(0)
        part.lose()

    def _use(self, loan: Loan, usable: int, *, drop_output: bool = False) -> None:
        """Let the first ``usable`` blocks of the loan be used, and no others.

        ``drop_output``: of a step in flight nothing of these requests is right.
        """
        first = loan.blocks.start
        if usable < loan.usable:
            gone = range(first + usable, loan.blocks.stop)
            for request in [each for each in self.running if self._holds(each, gone)]:
                if drop_output or not self._move_from(loan.side, [request], 1):
                    self._preempt(request, drop_output=drop_output)
            self._pool.withhold(gone)
        else:
            self._pool.offer(range(first + loan.usable, first + usable))
        loan.usable = usable

    def _holds(self, request: Request, blocks: range) -> bool:
        table = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        # All on one side, but for a table that is empty.
        return bool(table) and max(table) >= blocks.start and min(table) < blocks.stop

    def _preempt(self, request: Request, *, drop_output: bool = False) -> None:
        self._moved.pop(request.request_id, None)
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=drop_output)
        # It may start again in this very step.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _make_room(self) -> bool:
        """Move or preempt on each side what its running requests' next blocks do not fit beside.

        vLLM would preempt the last of all running requests, which may be of another side.
        """
        preempted = False
        for side in range(len(self._sides.ranges)):
            while (
                missing := self._needed_on(side) - self._pool.free_block_queue.free_on(side)
            ) > 0:
                here = self._running_on(side)[::-1]
                if not self._move_from(side, here, missing):
                    self._preempt(here[0])
                    preempted = True
        return preempted

    @contextmanager
    def _nobody_starting(self) -> Iterator[None]:
        """As in a step in which vLLM itself preempts: who left would take the room it made."""
        waiting = list(self.waiting)
        self.waiting.clear()
        yield
        waiting = [*self.waiting, *waiting]
        self.waiting.clear()
        self.waiting.extend(waiting)

    def _running_on(self, side: int | None) -> list[Request]:
        return [each for each in self.running if self.kv_cache_manager.side_of(each) == side]

    def _needed_on(self, side: int) -> int:
        """Blocks beyond those that they have, for the next step of the requests running there."""
        budget, needed = self.max_num_scheduled_tokens, 0
        for request in self.running:
            computed = request.num_computed_tokens
            left = request.num_tokens + request.num_output_placeholders - computed
            tokens = min(left, budget)
            budget -= tokens
            if self.kv_cache_manager.side_of(request) == side:
                has = len(self.kv_cache_manager.get_block_ids(request.request_id)[0])
                needed += max(0, self._blocks_for(computed + tokens) - has)
        return needed

    def _swap_out(self, request: Request) -> bool:
        if request is self._moving:
            return True
        # What lies with a lender is not in this engine's memory.
        return self.kv_cache_manager.side_of(request) == OWN and super()._swap_out(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._moved.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # Requests that change sides

    def _move_from(self, side: int, requests: Sequence[Request], missing_blocks: int) -> bool:
        """Whether one of them, in the order in which they would be preempted, goes elsewhere.

        Its full blocks are copied, and found in the other side's prefix cache when it goes on
        there, in this very step or the next; of the tokens behind them, fewer than a block, the KV
        is computed again.
        """
        if not self.lending.move or not self.loans or not self.cache_config.enable_prefix_caching:
            return False
        if self._part_is_away:  # own blocks are of another shape
            return False
        # What passes through the KV store is copied from and to this engine's memory.
        requests = [each for each in requests if not hands_over(each)]
        sides = [self._side(each, None) for each in range(len(self._sides.ranges))]
        chosen = move(sides, [self._resident(each) for each in requests], side, missing_blocks)
        return chosen is not None and self._move(
            requests[chosen.request],
            chosen.side,
            lambda pairs: self._workers("move_blocks", side, chosen.side, pairs),
        )

    def _resident(self, request: Request) -> Resident:
        tokens = request.num_computed_tokens
        blocks = len(self.kv_cache_manager.get_block_ids(request.request_id)[0])
        return Resident(
            blocks=blocks,
            tokens=tokens,
            copy_s=self._costs.copy_s(blocks),
            recompute_s=self.step_times.prefill_s(tokens, self.max_num_scheduled_tokens),
        )

    def _move(self, request: Request, target: int, copy: Copy) -> bool:
        pool, size = self._pool, self.block_size
        # A step in flight has computed its blocks before the worker comes to copy them.
        full = min(request.num_computed_tokens // size, len(request.block_hashes))
        table = self.kv_cache_manager.get_block_ids(request.request_id)[0]
        with pool.on(target):
            (there,), _, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
                request.block_hashes, full * size
            )
            pool.touch(there)
            begin, cached = time.perf_counter(), len(there)
            if full - cached > pool.free_block_queue.free_on(target):
                pool.free_blocks(reversed(there))
                return False
            copies = pool.get_new_blocks(full - cached)
            pairs = [
                (block, copy.block_id)
                for block, copy in zip(table[cached:full], copies, strict=True)
            ]
            done = not pairs or copy(pairs)
            if done:
                pool.cache_full_blocks(request, [*there, *copies], cached, full, size, 0)
                self._costs.saw_copy(len(pairs), time.perf_counter() - begin)
            pool.free_blocks([*reversed(copies), *reversed(there)])
        if done:
            self._moving = request
            self._preempt(request)
            self._moving = None
            self._moved[request.request_id] = target
            self._moves += 1
        return bool(done)

    # Where requests start

    def _start_on(self, request: Request) -> int | None:
        if not self.loans or request.request_id in self._swapped or hands_over(request):
            return OWN
        moved = self._moved.get(request.request_id)
        if moved is not None:
            there = self._side(moved, request)
            if there.allowed and there.needed_blocks <= there.free_blocks:
                return moved
        waits_alone = not self.running
        arrival = Arrival(
            [self._side(side, request) for side in range(len(self._sides.ranges))],
            request.num_tokens,
            self._costs.rest_s(self._context_on(OWN)),
        )
        place = PLACEMENTS[self.lending.placement](arrival, self.lending.lent_share)
        return OWN if place is None and waits_alone else place

    def _side(self, side: int, request: Request | None) -> Partition:
        """With what the request needs there, if one arrives."""
        loan = self.loans.get(side)
        here = self._running_on(side)
        needed = tokens = 0
        if request is not None:
            tokens = request.num_tokens
            with self._pool.on(side):
                _, cached, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
                    request.block_hashes, tokens - 1
                )
            needed = self._blocks_for(tokens - cached)
        blocks = self._own_blocks - 1 if side == OWN else loan.usable if loan else 0
        growth = [self._most_blocks(each) - self._blocks_for(each.num_tokens) for each in here]
        return Partition(
            blocks=blocks,
            free_blocks=self._pool.free_block_queue.free_on(side),
            needed_blocks=needed,
            requests=len(here),
            tokens=self._context_on(side),
            token_s=self._costs.token_s,
            handoff_s=self._costs.handoff_s(side),
            allowed=side == OWN or (loan is not None and self._may_start(loan, tokens)),
            growth_blocks=sum(growth) / len(growth) if growth else None,
        )

    def _may_start(self, loan: Loan, tokens: int) -> bool:
        if not loan.open or loan.part is not None or self.lending.placement == "local":
            return False
        if self.lending.placement == "ratio":
            return True
        return self._context_on(loan.side) + tokens <= loan.use.tokens

    @property
    def _part_is_away(self) -> bool:
        return any(loan.part is not None and loan.part.away for loan in self.loans.values())

    @property
    def _own_blocks(self) -> int:
        more = sum(loan.part.usable for loan in self.loans.values() if loan.part is not None)
        return len(self._sides.ranges[OWN]) + more

    def _check(self, part: ShardSpec | None) -> None:
        """Whether it may leave beside the loans that are open; ``ValueError`` if not."""
        if any(loan.part is not None and (part or loan.layers) for loan in self.loans.values()):
            raise ValueError("part of this engine is with a lender already: let it come home first")
        if part is None:
            return
        if "layers" in part and self.loans:
            raise ValueError("layers move for all requests: drain the other loans first")
        if not self.cache_config.enable_prefix_caching:
            raise ValueError("parts move where prefix caching is on, which tells blocks apart")

    def _attended_by(self, loan: Loan) -> int:
        """Tokens of context, as many as if all heads of them were there."""
        if loan.part is None:
            return self._context_on(loan.side)
        if loan.layers:
            return 0
        heads = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.num_kv_heads
        away = loan.part.away * loan.ring.geometry.kv_heads
        return self._context_on(OWN) * away // int(heads)

    def _context_on(self, side: int) -> int:
        return sum(request.num_computed_tokens for request in self._running_on(side))

    def _observe(self) -> None:
        """Learn from the step that has just ended."""
        now = time.perf_counter()
        step_s = now - self._step_began
        self._costs.saw_step(step_s)
        for loan in self.loans.values():
            before, loan.seen = loan.seen, loan.ring.stats()
            service_s = (loan.seen.service_ns - before.service_ns) / 1e9
            delay_s = (loan.seen.pickup_ns - before.pickup_ns) / 1e9
            wait_s = (loan.seen.wait_ns - before.wait_ns) / 1e9
            tasks = loan.seen.tasks - before.tasks
            tokens = self._attended_by(loan)
            self._costs.saw_lender(loan.side, tokens, service_s, delay_s)
            loan.use = after(
                loan.use,
                Observation(
                    tasks=tasks,
                    step_s=step_s,
                    late_s=min(step_s, max(0.0, wait_s - service_s)),
                    # The ring keeps the longest ever. In a step with a stall, what was not
                    # service exceeds the usual by it.
                    worst_wait_s=max(0.0, wait_s - service_s - tasks * loan.usual_delay_s),
                    timed_out=False,
                    used_tokens=tokens,
                ),
                now,
            )
            if tasks:
                delay_s = max(0.0, wait_s - service_s) / tasks
                loan.usual_delay_s += _SMOOTHING * (delay_s - loan.usual_delay_s)

    def place(self, workers: WorkerCall, placement: str, lent_share: float) -> None:
        """Start requests where this policy says from now on."""
        given = {**self.lending.model_dump(), "placement": placement, "lent_share": lent_share}
        self.lending = LendingOptions.model_validate(given)
