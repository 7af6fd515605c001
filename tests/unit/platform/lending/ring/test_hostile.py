"""The task ring with an end that writes whatever it likes: the other neither fails nor believes."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch

from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingTask
from tests.unit.platform.lending.ring.test_ring import (
    ABREAST,
    BLOCK,
    BLOCKS,
    GQA,
    Local,
    Memory,
    Pair,
    Step,
    shm,
    step,
)
from tests.waiting import PATIENCE_S

__all__ = ["shm"]

LENT = BLOCKS - 4
ROUNDS = 10_000
"""In both of one test."""
WORDS = (0, 1, 2, 3, LENT, 99, -1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
WAIT_S = 0.002


class Scribbler:
    """Writes random values to random places of a ring that it maps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self) -> int:
        if self.random.random() < 0.7:
            return self.random.choice((*WORDS, os.getpid()))
        return self.random.randrange(-(2**63), 2**63)

    def control(self, ring: Ring) -> None:
        ring.words[self.random.randrange(len(ControlLine) * LINE_WORDS)] = self.value()

    def known(self, ring: Ring) -> None:
        """One of the words that mean something, each as likely."""
        line = self.random.choice(tuple(ControlLine))
        ring.words[line * LINE_WORDS + self.random.randrange(4)] = self.value()

    def metadata(self, ring: Ring) -> None:
        areas = ring.areas
        area = self.random.choice(
            (areas.query_start_loc, areas.seq_lens, areas.block_table, areas.slot_mapping)
        ).view(-1)
        bits = torch.iinfo(area.dtype).bits
        at = self.random.randrange(min(len(area), 8))
        area[at] = (self.value() + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    def rows(self, ring: Ring) -> None:
        areas = ring.areas
        area = self.random.choice((areas.query, areas.key, areas.value, areas.output))
        area[self.random.randrange(4)] = self.random.choice((float("nan"), float("inf"), 1e38))

    def anywhere(self, ring: Ring) -> None:
        kinds = (self.control, self.known, self.known, self.metadata, self.rows)
        for _ in range(self.random.randrange(1, 4)):
            self.random.choice(kinds)(ring)


class HostileBorrower:
    """Posts tasks of which some are in order, and spoils the ring before the lender looks."""

    def __init__(self, folder: Path, server: AttentionServer, memory: Memory, rows: Rows) -> None:
        self._path, self._server, self._memory, self._rows = folder / "ring", server, memory, rows
        self._steps = [step(GQA, [0, 0], [4, 40]), step(GQA, [3], [1])]
        self.scribbler = Scribbler(1)
        self.rings = 0
        self._open()

    def _open(self) -> None:
        self.ring = LentRing.create(self._path, GQA, 64, 4, 3)
        self.ring.granted = LENT
        self._server.open(self.ring, self._memory.caches, rows=self._rows)
        self._mine = Ring.attach(self._path)
        self._posted = 0
        self.rings += 1

    def strike(self) -> None:
        ring, random = self._mine, self.scribbler.random
        if random.random() < 0.3:
            self._write_step(random.choice(self._steps))
        if random.random() < 0.2:
            ring.words[ControlLine.STEP * LINE_WORDS + 3] = random.choice(tuple(RingTask))
        if random.random() < 0.8:
            self.scribbler.anywhere(ring)
        if random.random() < 0.3:
            ring.words[ControlLine.CLOSED * LINE_WORDS] = Closed.OPEN
        if random.random() < 0.9:
            posted = ControlLine.POSTED * LINE_WORDS
            ring.words[posted] = ring.counter(ControlLine.DONE) + 1

    def _write_step(self, one: Step) -> None:
        areas, requests, tokens = self._mine.areas, len(one.seq_lens), len(one.slot_mapping)
        areas.query_start_loc[: requests + 1] = one.query_start_loc
        areas.seq_lens[:requests] = one.seq_lens
        areas.block_table[:requests] = one.block_table
        areas.slot_mapping[:tokens] = one.slot_mapping
        words, at = self._mine.words, ControlLine.STEP * LINE_WORDS
        words[at] = self.scribbler.random.randrange(2**40)
        words[at + 1], words[at + 2], words[at + 3] = requests, tokens, RingTask.ATTEND
        words[ControlLine.POSTED * LINE_WORDS + 1] = self.scribbler.random.randrange(GQA.layers)

    def come_again(self) -> None:
        """Open another ring if the lender has given this one up."""
        if self._server.dead():
            self._server.close(self.ring)
            self._mine.close()
            self.ring.close()
            self._open()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [PLAIN, ABREAST], ids=["plain", "abreast"])
def test_whatever_a_borrower_writes_its_lender_serves_on_and_keeps_its_memory(
    shm: Path, rows: Rows
) -> None:
    server, memory = AttentionServer(spin_s=0), Memory(GQA)
    lent = {int(rows.of(block)) for block in range(LENT)}
    own = [block for block in range(BLOCKS) if block not in lent]
    memory.bytes[own] = torch.randn_like(memory.bytes[own])
    before = memory.bytes.clone()
    borrower = HostileBorrower(shm, server, memory, rows)
    good = Pair(shm, GQA, server)
    local, asked = Local(GQA), step(GQA, [0], [4])
    served = 0
    for at in range(ROUNDS // 2):
        borrower.strike()
        served += server.poll()
        server.idle()
        server.busy()
        borrower.come_again()
        if at % 500 == 0:
            # Another borrower of the same lender goes on.
            good.begin(asked)
            assert torch.equal(good.attend(0, asked), local.attend(0, asked))
    assert torch.equal(memory.bytes[own], before[own])
    assert torch.equal(memory.bytes[:, GQA.layers], before[:, GQA.layers])
    assert served > 50, "tasks in order are served"
    assert borrower.rings > 50, "and the others end their loan"
    server.close(borrower.ring)
    assert not memory.bytes[sorted(lent), : GQA.layers].any(), "nothing that it wrote is left"
    server.stop()


def test_a_control_word_that_is_none_closes_the_ring_as_failed(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    for word in (99, -1, 2**63 - 1):
        ring = Ring.create(tmp_path / "other", GQA, 1, 1, 1)
        ring.words[ControlLine.CLOSED * LINE_WORDS] = word
        assert ring.closed is Closed.FAILED
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    pair.borrower.ring.words[ControlLine.CLOSED * LINE_WORDS] = 99
    assert pair.server.poll() == 0
    assert pair.server.dead() == [pair.ring]
    assert not pair.borrower.wait(pair.output(one), 1.0)


def test_a_borrower_cannot_open_a_ring_again_nor_skip_the_check_of_its_step(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    pair.ring.granted = LENT
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.attend(0, one)
    before = pair.memory.bytes.clone()
    # Its first place is wrong in whatever numbering, the others are of blocks that are not lent.
    one.slot_mapping[:] = (BLOCKS - 1) * BLOCK
    one.slot_mapping[0] = -1
    pair.begin(one)
    pair.post(one)
    assert pair.server.poll() == 0
    words = pair.borrower.ring.words
    for number in (0, words[ControlLine.STEP * LINE_WORDS]):
        words[ControlLine.STEP * LINE_WORDS] = number
        words[ControlLine.CLOSED * LINE_WORDS] = Closed.OPEN
        assert pair.server.poll() == 0
        assert pair.ring.closed is Closed.REFUSED
    assert torch.equal(pair.memory.bytes, before)


def test_a_task_without_a_step_is_none(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    pair.ring.words[ControlLine.POSTED * LINE_WORDS] = 1
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED


def test_a_borrower_cannot_raise_its_own_limit(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    pair.ring.granted = 2
    before = pair.memory.bytes.clone()
    pair.borrower.ring.words[ControlLine.GRANTED * LINE_WORDS] = BLOCKS
    one = step(GQA, [0, 0], [4, 40])
    pair.begin(one)
    pair.post(one)
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED
    assert pair.ring.granted == 2
    assert torch.equal(pair.memory.bytes, before)


def test_the_lenders_page_has_no_name_once_both_its_processes_map_it(tmp_path: Path) -> None:
    made = LentRing.create(tmp_path / "ring", GQA, 1, 1, 1)
    scheduler = LentRing.attach(made.path)
    assert [path.name for path in tmp_path.iterdir()] == ["ring"]
    scheduler.granted = 7
    assert made.granted == Ring.attach(made.path).granted == 7


def test_times_of_a_post_that_cannot_be_do_not_count(tmp_path: Path) -> None:
    begin = time.monotonic_ns()
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    for at in (-(2**63), 0, 2**63 - 1):
        pair.begin(one)
        pair.post(one)
        pair.ring.words[ControlLine.POSTED * LINE_WORDS + 2] = at
        assert pair.server.poll() == 1
        assert pair.borrower.wait(pair.output(one), 1.0)
    assert 0 <= pair.ring.stats().pickup_ns <= time.monotonic_ns() - begin
    pair.borrower.ring.words[ControlLine.LENDER_STATS * LINE_WORDS] = -5
    assert pair.ring.stats().polled == 3


@pytest.mark.parametrize("rows", [PLAIN, ABREAST], ids=["plain", "abreast"])
def test_what_is_given_back_holds_nothing_that_spoils_attention(tmp_path: Path, rows: Rows) -> None:
    pair = Pair(tmp_path, GQA, rows=rows)
    one = step(GQA, [0, 0], [4, 40])
    one.qkv.fill_(float("nan"))
    pair.begin(one)
    for layer in range(GQA.layers):
        pair.attend(layer, one)
    kept = [int(rows.of(block)) for block in range(4)]
    given_back = [int(rows.of(block)) for block in range(4, 6)]
    theirs = pair.memory.bytes[:, : GQA.layers]
    assert theirs[given_back].isnan().any()
    pair.ring.granted = 4
    pair.server.busy()
    assert not theirs[given_back].any()
    assert theirs[kept].isnan().any()
    pair.server.close(pair.ring)
    assert not theirs.any()
    assert (pair.memory.bytes[:, GQA.layers] == 7).all()


@pytest.mark.timeout(300)
def test_whatever_a_lender_writes_its_borrower_neither_fails_nor_waits_long(shm: Path) -> None:
    scribbler, one = Scribbler(2), step(GQA, [0], [4])
    server = AttentionServer()
    answered = 0
    for at in range(ROUNDS // 80):
        ring = LentRing.create(shm / f"ring{at}", GQA, 64, 4, 3)
        ring.granted = LENT
        server.open(ring, Memory(GQA).caches)
        server.busy()
        theirs = Ring.attach(ring.path)
        borrower = Borrower(Ring.attach(ring.path))
        guarded = torch.full((6, 9 * 64), 5.0)
        for _ in range(20):
            scribbler.anywhere(theirs)
            borrower.begin_step(
                one.query_start_loc, one.seq_lens, one.block_table, one.slot_mapping
            )
            borrower.post(0, *one.of_layer(0, GQA))
            server.poll()
            scribbler.anywhere(theirs)
            begin = time.monotonic()
            answered += borrower.wait(guarded[1:5], WAIT_S)
            borrower.begin_copy([0, 1], RingTask.READ)
            borrower.read(0, WAIT_S)
            assert time.monotonic() - begin < PATIENCE_S, "a wait is bounded"
            assert (guarded[0] == 5).all()
            assert (guarded[5] == 5).all()
            if borrower.ring.closed is not Closed.OPEN:
                break
        # A ring that was closed is closed for good.
        borrower.ring.shut(Closed.DRAINED)
        theirs.words[ControlLine.CLOSED * LINE_WORDS] = Closed.OPEN
        borrower.post(0, *one.of_layer(0, GQA))
        assert not borrower.wait(guarded[1:5], WAIT_S)
        server.close(ring)
        for each in (theirs, borrower.ring, ring):
            each.close()
        ring.unlink()
    assert answered > 10
    server.stop()
