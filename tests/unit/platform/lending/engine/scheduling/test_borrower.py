"""A borrower's hooks, without vLLM's scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling.borrower import BorrowerHooks
from loomserve.platform.lending.engine.scheduling.loan import Loan
from loomserve.platform.lending.engine.shards.migration import ShardMigration
from loomserve.platform.lending.policy.limits import Rules, first
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import Closed
from loomserve.platform.state.lending_options import LendingOptions
from tests.unit.platform.lending.engine.scheduling.scheduled import (
    SIZE,
    Scheduled,
    config,
    new_ring,
)

BLOCKS, LENT = 16, range(8, 16)
"""Own blocks are 0 to 7, of which vLLM takes one for itself."""


class Borrower:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.partitions = Partitions([0, LENT.start], BLOCKS)
        self.engine = Scheduled(self.partitions)
        self.hooks = BorrowerHooks(
            self.engine,
            self.partitions,
            LendingOptions(**options),
            config(BLOCKS),
            prefix_caching=True,
        )
        self.pool = self.engine.kv_cache_manager.pool
        self.pool.withhold(LENT)
        self.ring = new_ring(folder, granted=len(LENT))
        self.called: list[tuple[Any, ...]] = []

    def open(self) -> Loan:
        rules = Rules(most_tokens=512, step_tokens=SIZE, stall_s=1.0)
        ring, limit = Ring.attach(self.ring.path), first(rules, time.perf_counter())
        loan = Loan("one", 1, ring, LENT, ring.stats(), limit)
        self.hooks.open(loan, self.call)
        return loan

    def call(self, *given: Any) -> bool:
        self.called.append(given)
        return True

    def free_on(self, partition: int) -> int:
        return self.hooks.use.free_on(partition)


@pytest.fixture
def borrower(tmp_path: Path) -> Borrower:
    return Borrower(tmp_path)


def test_a_loan_offers_as_many_blocks_as_its_lender_grants(borrower: Borrower) -> None:
    assert borrower.free_on(1) == 0
    loan = borrower.open()
    assert (loan.usable, borrower.free_on(1)) == (8, 8)
    borrower.ring.wanted = 5
    assert borrower.hooks.before_schedule()
    assert (loan.usable, borrower.free_on(1), borrower.ring.vacated) == (5, 5, 5)


def test_what_a_lender_takes_back_moves_home_where_there_is_room(borrower: Borrower) -> None:
    borrower.open()
    request = borrower.engine.run(3 * SIZE, 1)
    borrower.ring.wanted = 0
    borrower.hooks.before_schedule()
    ((method, source, target, pairs),) = borrower.called
    assert (method, source, target, len(pairs)) == ("move_blocks", 1, OWN, 3)
    assert borrower.engine.preempted == [(request, False)]
    assert borrower.hooks.placement.start_on(request) == OWN
    assert borrower.hooks.moves.count == 1


@pytest.mark.parametrize("options", [{"move": False}, {}])
def test_what_finds_no_room_is_preempted(tmp_path: Path, options: dict[str, Any]) -> None:
    borrower = Borrower(tmp_path, **options)
    borrower.open()
    borrower.engine.run(6 * SIZE, OWN)
    request = borrower.engine.run(3 * SIZE, 1)
    borrower.ring.wanted = 0
    borrower.hooks.before_schedule()
    assert borrower.called == []
    assert borrower.engine.preempted == [(request, False)]
    assert borrower.hooks.moves.target_of(request) is None


def test_when_a_ring_closes_its_requests_leave_and_the_step_in_flight_is_dropped(
    borrower: Borrower,
) -> None:
    borrower.open()
    own, lent = borrower.engine.run(SIZE, OWN), borrower.engine.run(SIZE, 1)
    borrower.ring.shut(Closed.REVOKED)
    borrower.hooks.before_update(scheduled_tokens=2)
    assert borrower.engine.preempted == [(lent, True)]
    assert borrower.engine.running == [own]
    assert borrower.hooks.loans == {}
    assert borrower.hooks.broken == {Closed.REVOKED: 1}
    assert borrower.free_on(1) == 0


def test_nobody_starts_in_a_step_that_a_full_partition_preempts_for(borrower: Borrower) -> None:
    older, newer = borrower.engine.run(4 * SIZE, OWN), borrower.engine.run(3 * SIZE, OWN)
    for request in (older, newer):
        borrower.engine.grow(request)
    assert borrower.free_on(OWN) == 0
    assert not borrower.hooks.before_schedule()
    assert borrower.engine.preempted == [(newer, False)]
    assert borrower.hooks.before_schedule()


def test_a_full_partition_leaves_the_requests_of_others_alone(tmp_path: Path) -> None:
    borrower = Borrower(tmp_path, move=False)
    borrower.open()
    full = borrower.engine.run(7 * SIZE, OWN)
    other = borrower.engine.run(SIZE, 1)
    borrower.engine.grow(full)
    assert not borrower.hooks.before_schedule()
    assert borrower.engine.preempted == [(full, False)]
    assert borrower.engine.running == [other]


@pytest.mark.parametrize(
    ("prepare", "place"),
    [
        (lambda one: None, OWN),
        (lambda one: one.engine.run(7 * SIZE, OWN), 1),
        (lambda one: [one.engine.run(7 * SIZE, OWN), one.hooks.drain(one.hooks.loans[1])], None),
    ],
    ids=["own memory has room", "own memory is full", "it is, and the loan drains"],
)
def test_a_request_starts_where_there_is_room(
    borrower: Borrower, prepare: Callable[[Borrower], None], place: int | None
) -> None:
    borrower.open()
    prepare(borrower)
    assert borrower.hooks.placement.start_on(borrower.engine.request(SIZE)) == place


def test_a_request_that_waits_alone_starts_in_own_memory(borrower: Borrower) -> None:
    borrower.hooks.drain(borrower.open())
    borrower.pool.withhold(range(1, LENT.start))
    assert borrower.hooks.placement.start_on(borrower.engine.request(SIZE)) == OWN


def test_a_drained_loan_is_empty_once_its_requests_have_moved(borrower: Borrower) -> None:
    loan = borrower.open()
    borrower.engine.run(2 * SIZE, 1)
    assert borrower.hooks.drain(loan)
    assert [call[0] for call in borrower.called] == ["move_blocks"]


def test_kv_of_a_request_that_moves_is_kept_and_of_one_that_is_lent_is_not_swapped(
    borrower: Borrower,
) -> None:
    borrower.open()
    own, lent = borrower.engine.run(SIZE, OWN), borrower.engine.run(SIZE, 1)
    assert [borrower.hooks.in_own_memory(each) for each in (own, lent)] == [True, False]
    assert not borrower.hooks.keeps_kv(lent)
    kept = list[bool]()

    def preempt(request: Any, *, drop_output: bool = False) -> None:
        kept.append(borrower.hooks.keeps_kv(request))
        Scheduled.preempt(borrower.engine, request, drop_output=drop_output)

    borrower.engine.preempt = preempt  # type: ignore[method-assign]
    borrower.hooks.drain(borrower.hooks.loans[1])
    assert kept == [True]


def test_kv_that_leaves_with_the_memory_of_a_shard_is_not_swapped(borrower: Borrower) -> None:
    # The shard may come home, and its memory be given back, before the next step saves anything.
    borrower.ring.granted = 0
    loan = borrower.open()
    borrower.ring.granted = borrower.ring.wanted = BLOCKS
    loan.shard = ShardMigration(borrower.pool, borrower.partitions, 1, BLOCKS, 1, borrower.call)
    borrower.hooks.follow(loan)
    assert loan.shard.usable == len(LENT)
    stays = borrower.engine.run(SIZE, OWN)
    # More than there is own memory for.
    leaves = borrower.engine.run((LENT.start + 2) * SIZE, OWN)
    in_own_memory = dict[Any, bool]()

    def preempt(request: Any, *, drop_output: bool = False) -> None:
        in_own_memory[request] = borrower.hooks.in_own_memory(request)
        Scheduled.preempt(borrower.engine, request, drop_output=drop_output)

    borrower.engine.preempt = preempt  # type: ignore[method-assign]
    assert borrower.hooks.in_own_memory(leaves)
    borrower.hooks.drain(loan)
    assert in_own_memory == {leaves: False}
    assert borrower.engine.running == [stays]
    assert borrower.hooks.in_own_memory(stays)


def test_whatever_a_lender_writes_its_borrower_schedules_on_in_its_own_memory(
    borrower: Borrower, tmp_path: Path
) -> None:
    values = random.Random(4)
    kept = borrower.engine.run(3 * SIZE, OWN)
    usable_most = 0
    for _ in range(5_000):
        if not borrower.hooks.loans:
            borrower.ring = new_ring(tmp_path, granted=len(LENT))
            borrower.open()
        theirs = Ring.attach(borrower.ring.path)
        word = values.randrange(len(theirs.words))
        theirs.words[word] = values.choice((0, 1, 99, -1, 2**63 - 1, -(2**63), BLOCKS))
        borrower.hooks.before_schedule()
        borrower.engine.step_began = time.perf_counter()
        borrower.hooks.before_update(scheduled_tokens=1)
        for loan in borrower.hooks.loans.values():
            assert 0 <= loan.usable <= len(LENT)
            usable_most = max(usable_most, loan.usable)
        theirs.close()
    assert usable_most == len(LENT)
    assert borrower.engine.running == [kept]
    assert borrower.engine.preempted == []
    assert borrower.free_on(OWN) == LENT.start - 1 - 3
    assert set(borrower.hooks.broken) <= set(Closed)
