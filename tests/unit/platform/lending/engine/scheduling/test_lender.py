"""A lender's hooks, without vLLM's scheduler."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.scheduling import lender as module
from loomserve.platform.lending.engine.scheduling.calls import EngineLoanCalls
from loomserve.platform.lending.engine.scheduling.lender import LenderHooks, Lent
from loomserve.platform.lending.messages import LentReport
from loomserve.platform.lending.policy.layout import Layout
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import Closed
from loomserve.platform.state.lending_options import LendingOptions
from tests.unit.platform.lending.engine.scheduling.scheduled import (
    GEOMETRY,
    SIZE,
    SPEC,
    Scheduled,
    config,
    new_ring,
)

BLOCKS, LENDABLE = 32, 8
LAYOUT = Layout(GEOMETRY.layers, GEOMETRY.layer_block_bytes)


class Lender:
    def __init__(self, folder: Path) -> None:
        partitions = Partitions([0], BLOCKS)
        self.engine = Scheduled(partitions)
        options = LendingOptions(lend_bytes=LENDABLE * SPEC.page_size_bytes)
        self.hooks = LenderHooks(self.engine, partitions, options, config(BLOCKS))
        self.ring = new_ring(folder, granted=0)
        self.called: list[tuple[Any, ...]] = []

    def open(self) -> Lent:
        blocks, _ = self.hooks.room_for(LAYOUT, LENDABLE)
        self.hooks.prepare(self.call)
        lent = Lent("one", LentRing.attach(self.ring.path), blocks, LAYOUT, len(blocks))
        self.hooks.open(lent)
        return lent

    def call(self, *given: Any) -> None:
        self.called.append(given)

    def calls(self) -> EngineLoanCalls:
        borrower: Any = None
        return EngineLoanCalls(
            borrower, self.hooks, block_size=SIZE, block_bytes=1, stall_s=1.0,
            prefix_caching=True, workers=self.call,
        )  # fmt: skip

    @property
    def free(self) -> int:
        return self.engine.kv_cache_manager.pool.free_on(OWN)

    @property
    def used(self) -> set[int]:
        """Blocks of own requests."""
        coordinator = self.engine.kv_cache_manager.coordinator
        return {
            block.block_id
            for request in self.engine.running
            for block in coordinator.get_blocks(request.request_id)[0]
        }

    def step(self, values: random.Random) -> None:
        """One in which requests come, go, wait or wait no more."""
        running, waiting = self.engine.running, self.engine.waiting
        self.hooks.before_schedule()
        match values.randrange(4):
            case 0 if (blocks := values.randrange(1, 9)) <= self.free:
                self.engine.run(blocks * SIZE, OWN)
            case 1 if running:
                self.engine.preempt(values.choice(running))
            case 2:
                waiting.add_request(self.engine.request(values.randrange(1, 17) * SIZE))
            case 3 if waiting:
                waiting.pop_request()
        self.hooks.after_update(scheduled_tokens=0)


@pytest.fixture
def lender(tmp_path: Path) -> Lender:
    return Lender(tmp_path)


def test_the_tail_of_own_memory_is_lent_and_no_more_than_that(lender: Lender) -> None:
    assert lender.hooks.room_for(LAYOUT, 100) == (range(24, 32), LENDABLE)
    assert lender.hooks.room_for(LAYOUT, 3) == (range(29, 32), 3)
    lent = lender.open()
    assert (lent.held, lender.ring.granted, lender.free) == (8, 8, BLOCKS - 1 - 8)
    assert lender.hooks.room_for(LAYOUT, 1)[1] == 0


def test_blocks_in_use_are_lent_once_they_are_free(lender: Lender) -> None:
    requests = [lender.engine.run(blocks * SIZE, OWN) for blocks in (16, 15)]
    lent = lender.open()
    assert (lent.held, lender.ring.granted) == (0, 0)
    for request in requests:
        lender.engine.preempt(request)
    lender.hooks.after_update(scheduled_tokens=0)
    assert (lent.held, lender.ring.granted) == (8, 8)


@pytest.mark.parametrize("queued", range(2, 9))
def test_blocks_in_use_are_not_lent_when_fewer_shall_be(lender: Lender, queued: int) -> None:
    first, later, last = (lender.engine.run(blocks * SIZE, OWN) for blocks in (16, 11, 1))
    lender.engine.preempt(later)
    lent = lender.open()
    assert (lent.held, lender.ring.granted) == (4, 4)
    lender.ring.vacated = 4
    lender.engine.waiting.add_request(lender.engine.request(queued * SIZE))
    lender.hooks.before_schedule()
    if lent.target >= 4:
        assert (lent.held, lender.ring.granted) == (4, 4)
    lender.ring.vacated = min(4, lent.target)
    lender.engine.preempt(first)
    lender.engine.waiting.pop_request()
    lender.hooks.before_schedule()
    assert lender.ring.granted >= lender.ring.vacated
    lender.engine.preempt(last)
    lender.hooks.after_update(scheduled_tokens=0)
    assert (lent.held, lender.ring.granted) == (8, 8)


def test_a_borrower_is_asked_for_what_own_requests_lack_and_gives_it_back(lender: Lender) -> None:
    lent = lender.open()
    lender.engine.waiting.add_request(lender.engine.request(30 * SIZE))
    lender.ring.vacated = 8
    assert lender.hooks.before_schedule()
    assert lender.ring.wanted == 0
    assert (lent.held, lender.ring.granted) == (8, 8), "the borrower is still there"
    lender.ring.vacated = 0
    lender.hooks.before_schedule()
    assert (lent.held, lent.taken_back, lender.ring.granted) == (0, 8, 0)
    assert lender.free == BLOCKS - 1


def test_a_borrower_that_gives_back_in_time_has_as_long_for_what_is_asked_for_next(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = lender.open()
    lender.ring.vacated = 8
    lender.engine.waiting.add_request(lender.engine.request(27 * SIZE))
    lender.hooks.before_schedule()
    first = lender.ring.wanted
    assert 0 < first < 8
    lender.ring.vacated = first
    monkeypatch.setattr(module, "GIVE_BACK_S", 0.05)
    time.sleep(0.1)
    lender.engine.waiting.pop_request()
    lender.engine.waiting.add_request(lender.engine.request(30 * SIZE))
    lender.hooks.before_schedule()
    assert lender.ring.wanted < first
    assert (lender.ring.closed, lent.held, lender.ring.granted) == (Closed.OPEN, first, first)


def test_a_borrower_that_does_not_give_back_in_time_loses_its_loan(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.open()
    lender.engine.waiting.add_request(lender.engine.request(30 * SIZE))
    lender.ring.vacated = 8
    lender.hooks.before_schedule()
    monkeypatch.setattr(module, "GIVE_BACK_S", 0.0)
    lender.hooks.before_schedule()
    assert lender.ring.closed is Closed.REVOKED
    lender.hooks.before_schedule()
    assert lender.hooks.lent == {}
    assert lender.called == [("end_lending", str(lender.ring.path))]
    assert lender.free == BLOCKS - 1


def test_all_is_back_at_once_when_a_loan_ends(lender: Lender) -> None:
    lender.hooks.end(lender.open())
    assert lender.ring.closed is Closed.DRAINED
    assert lender.free == BLOCKS - 1


def test_an_idle_lender_lends_all_again(lender: Lender) -> None:
    lent = lender.open()
    waiting = lender.engine.request(30 * SIZE)
    lender.engine.waiting.add_request(waiting)
    lender.hooks.before_schedule()
    assert lent.held == 0
    lender.hooks.on_idle()
    assert lent.held == 0, "it is not idle"
    lender.engine.waiting.remove_request(waiting)
    for _ in range(4):
        lender.hooks.on_idle()
    assert lent.held == 8


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lent_that_a_request_has_and_nothing_taken_that_a_borrower_uses(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(module, "GIVE_BACK_S", 1e9)
    lent, theirs, values = lender.open(), Ring.attach(lender.ring.path), random.Random(seed)
    used, seen = 0, set[int]()
    for _ in range(500):
        lender.step(values)
        assert not lender.used & set(lent.blocks[: lent.held])
        assert used <= lent.ring.granted == lent.held
        if values.random() < 0.5:
            used = theirs.vacated = theirs.claim()
            seen.add(used)
    assert seen == set(range(LENDABLE + 1))


def test_whatever_a_borrower_writes_its_lender_schedules_on(
    lender: Lender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_BACK_S", 0.0)
    values = random.Random(3)
    held_most = 0
    for at in range(5_000):
        if not lender.hooks.lent:
            lender.ring = new_ring(tmp_path, granted=0)
            lender.open()
        theirs = Ring.attach(lender.ring.path)
        word = values.randrange(len(theirs.words))
        theirs.words[word] = values.choice((0, 1, 99, -1, 2**63 - 1, -(2**63), BLOCKS))
        if at % 50 == 0:
            lender.engine.waiting.add_request(lender.engine.request(30 * SIZE))
        elif at % 50 == 25:
            lender.engine.waiting.remove_request(next(iter(lender.engine.waiting)))
        lender.hooks.before_schedule()
        lender.hooks.after_update(scheduled_tokens=1)
        for lent in lender.hooks.lent.values():
            assert lent.ring.granted == lent.held <= LENDABLE
            held_most = max(held_most, lent.held)
        for report in lender.calls().lent_state():
            LentReport.model_validate(report)
        theirs.close()
    assert held_most == LENDABLE
    for lent in list(lender.hooks.lent.values()):
        lender.hooks.end(lent)
    assert lender.free == BLOCKS - 1
