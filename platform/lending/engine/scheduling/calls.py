"""Loan calls, answered by an engine's scheduler and its worker together."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from loomserve.platform.engine.scheduler_calls import WorkerCall
from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.scheduling.borrower import BorrowerHooks
from loomserve.platform.lending.engine.scheduling.lender import LenderHooks, Lent
from loomserve.platform.lending.engine.scheduling.loan import Loan
from loomserve.platform.lending.engine.shards.migration import ShardMigration
from loomserve.platform.lending.messages import BorrowerReport, LentReport, LoanReport
from loomserve.platform.lending.policy.layout import Layout
from loomserve.platform.lending.policy.limits import LoanLimit, Rules, first
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.state.lending_options import LendingOptions, ShardSpec

_PROBE_BLOCKS = 8
"""Blocks of context with which an unknown lender is tried."""


@dataclass(frozen=True)
class EngineLoanCalls:
    """Calls of a replica to its engine that open, change, show and end loans. They cross vLLM's RPC
    by these names, between two steps, with what they take and return as JSON; classes of
    :mod:`loomserve.platform.lending.messages` give it types. ``ValueError`` refuses a call. An
    engine lends or borrows at a time, but not both. A lender that takes longer than ``stall_s`` for
    a task is too slow."""

    borrower: BorrowerHooks
    lender: LenderHooks
    workers: WorkerCall
    _: KW_ONLY
    block_size: int
    block_bytes: int
    stall_s: float
    prefix_caching: bool

    # Of a borrower

    def borrowing(self, shard: ShardSpec | None = None) -> dict[str, Any]:
        return dict(self.workers("borrowing", shard))

    def borrow(self, name: str, path: str, shard: ShardSpec | None = None) -> int:
        """Use a loan whose lender has made the task ring at ``path``; returns its partition. A
        shard moves there while steps run; without one, whole requests start there."""
        partition = self._free_partition(shard)
        ring = Ring.attach(Path(path))
        migration = None
        if shard:
            migration = self._begin_migration(partition, path, ring, shard)
        else:
            self.workers("borrow", partition, path)
        blocks = self.borrower.partitions.ranges[partition]
        loan = Loan(
            name, partition, ring, blocks, ring.stats(), self._first_limit(len(blocks)),
            shard=migration, layers=shard is not None and "layers" in shard,
        )  # fmt: skip
        self.borrower.open(loan, self.workers)
        return partition

    def limit_loan(self, partition: int, most_bytes: int | None) -> None:
        """Use at most ``most_bytes`` of a loan; None: all that the lender grants. What lies beyond
        moves where there is room, or is computed again."""
        loan = self.borrower.loans.get(partition)
        if loan is not None:  # else it has just ended by itself
            loan.most = None if most_bytes is None else most_bytes // self.block_bytes
            self.borrower.follow(loan)

    def drain_loan(self, partition: int) -> bool:
        """Start no request there any more; returns whether nothing is left there."""
        loan = self.borrower.loans.get(partition)
        # One that is not there has just ended by itself.
        return loan is None or self.borrower.drain(loan)

    def end_loan(self, partition: int) -> None:
        """Compute elsewhere what is left there, and forget the loan, whatever its state."""
        loan = self.borrower.loans.get(partition)
        if loan is not None:
            self.borrower.end(loan)
        self.workers("end_loan", partition)

    def loan_state(self) -> dict[str, Any]:
        self.borrower.follow_idle()
        return BorrowerReport(
            own_blocks=self.borrower.placement.own_blocks,
            own_free_blocks=self.borrower.use.free_on(OWN),
            moved=self.borrower.moves.count,
            broken={reason.name: count for reason, count in self.borrower.broken.items()},
            loans=tuple(map(self._report, self.borrower.loans.values())),
        ).model_dump()

    def place(self, placement: str, lent_share: float) -> None:
        options = self.borrower.placement.options
        given = {**options.model_dump(), "placement": placement, "lent_share": lent_share}
        self.borrower.placement.options = LendingOptions.model_validate(given)

    def _free_partition(self, shard: ShardSpec | None) -> int:
        """A partition for one more loan; ``ValueError`` where there can be none."""
        if self.lender.lent:
            raise ValueError("it lends just now, and its borrowers would wait for its own lender")
        loans = self.borrower.loans
        if any(loan.shard is not None and (shard or loan.layers) for loan in loans.values()):
            raise ValueError("a shard of this engine is with a lender: let it come home first")
        if shard and "layers" in shard and loans:
            raise ValueError("layers move for all requests: drain the other loans first")
        if shard and not self.prefix_caching:
            raise ValueError("shards move where prefix caching is on, which tells blocks apart")
        free = set(range(1, len(self.borrower.partitions.ranges))) - loans.keys()
        if not free:
            raise ValueError(f"{len(loans)} loans are open, and lending.lenders allows no more")
        return min(free)

    def _begin_migration(
        self, partition: int, path: str, ring: Ring, shard: ShardSpec
    ) -> ShardMigration:
        room = self.workers("shard", "begin", partition, path, shard)
        size = ring.geometry.layers * ring.geometry.layer_block_bytes
        pool, partitions = self.borrower.use.pool, self.borrower.partitions
        return ShardMigration(pool, partitions, partition, room, size, self.workers)

    def _first_limit(self, blocks: int) -> LoanLimit:
        rules = Rules(
            most_tokens=blocks * self.block_size,
            step_tokens=self.block_size * _PROBE_BLOCKS,
            stall_s=self.stall_s,
        )
        return first(rules, time.perf_counter())

    def _report(self, loan: Loan) -> LoanReport:
        return LoanReport(
            name=loan.name,
            partition=loan.partition,
            usable_blocks=loan.usable,
            free_blocks=self.borrower.use.free_on(loan.partition),
            requests=len(self.borrower.use.running_on(loan.partition)),
            open=loan.open,
            phase=str(loan.limit.phase),
            shard=loan.shard.state() if loan.shard is not None else None,
            most_tokens=loan.limit.tokens,
            **loan.ring.stats()._asdict(),
        )

    # Of a lender

    def lend(self, name: str, path: str, borrower: dict[str, Any]) -> int:
        """Make a task ring, and lend as much as the borrower asks or as there is left; returns how
        many of the borrower's blocks may come to lie there."""
        if self.borrower.loans:
            raise ValueError("it borrows just now, and its borrowers would wait for its own lender")
        geometry = Geometry.from_json(borrower["geometry"])
        layout = Layout(geometry.layers, geometry.layer_block_bytes)
        blocks, places = self.lender.room_for(layout, borrower["blocks"])
        if places < (least := borrower["least"]):
            raise ValueError(
                f"there is room for {places} of the borrower's blocks, which are {least} at least: "
                "raise lending.lend_memory of this model"
            )
        self.lender.prepare(self.workers)
        self.workers("lend", path, blocks.start, len(blocks), borrower)
        self.lender.plans = self.workers("slicing_plans")
        self.lender.open(Lent(name, LentRing.attach(Path(path)), blocks, layout, len(blocks)))
        return places

    def end_lending(self, name: str) -> None:
        """Take everything back at once; the borrower computes elsewhere what it had here."""
        lent = self.lender.lent.get(name)
        if lent is not None:
            self.lender.end(lent)

    def on_idle(self) -> None:
        """Lend more while the engine has no requests, and so does not schedule."""
        self.lender.on_idle()

    def look_for_tasks(self, polling: str) -> dict[str, Any]:
        """Look for tasks as ``lending.polling`` says; returns how operators are sliced."""
        self.lender.plans = self.workers("look_for_tasks", polling)
        return self.lender.plans

    def lent_state(self) -> list[dict[str, Any]]:
        return [self._lent_report(lent).model_dump() for lent in self.lender.lent.values()]

    def _lent_report(self, lent: Lent) -> LentReport:
        return LentReport(
            name=lent.name,
            blocks=lent.held,
            most_blocks=len(lent.blocks),
            taken_back_blocks=lent.taken_back,
            closed=lent.ring.closed.name,
            slicing=self.lender.plans,
            **lent.ring.stats()._asdict(),
        )
