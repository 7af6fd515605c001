"""Copies of blocks between a ring and the caches of a lender whose rows kernels carry."""

from __future__ import annotations

from torch import Tensor

from loomserve.platform.lending.policy.layout import Rows
from loomserve.platform.lending.ring.attention_server import Caches
from loomserve.platform.lending.ring.lent_ring import STATS, LentRing
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingTask

_, IDLED, SERVICE_NS, PICKUP_NS = range(4)
"""The lender's counters."""


class BlockCopies:
    """What one borrower writes: the copies that it asks for, and what kernels tell of."""

    def __init__(self, ring: LentRing, caches: Caches, rows: Rows) -> None:
        self.written = 0
        """Blocks from it on hold nothing of the borrower's."""
        self._ring, self._caches, self._rows = ring, caches, rows
        self._done = ring.words[ControlLine.DONE * LINE_WORDS]
        self._step: int | None = None
        self._end = 0
        self._work = RingTask.READ
        self._blocks: list[int] = []

    def serve(self) -> bool:
        """Serve at most one copy; False if none is there. Any other task closes the ring."""
        ring, words, posted = self._ring, self._ring.words, ControlLine.POSTED * LINE_WORDS
        number = words[posted]
        if number == self._done or ring.closed is not Closed.OPEN:
            return False
        layer = words[posted + 1]
        if (
            number != self._done + 1
            or not 0 <= layer < len(self._caches)
            or not self._step_is_valid()
        ):
            ring.shut(Closed.REFUSED)
            return False
        self.wrote(self._end)
        self._copy(self._caches[layer])
        self._done = words[ControlLine.DONE * LINE_WORDS] = number
        return True

    def wrote(self, end: int) -> None:
        """Note that blocks before this one may hold what the borrower had written."""
        self.written = max(self.written, end)

    def clear(self, first: int) -> None:
        """Set to zero what the borrower has written from this block of its own on."""
        if first >= self.written:
            return
        for rows in self._rows.between(first, self.written):
            for key, value in self._caches:
                key[rows].zero_()
                value[rows].zero_()
        self.written = first

    def count(self, counter: int, amount: int) -> None:
        own = self._ring.own_words
        own[STATS + counter] += amount
        # So that the borrower sees it, too.
        self._ring.words[ControlLine.LENDER_STATS * LINE_WORDS + counter] = own[STATS + counter]

    def _step_is_valid(self) -> bool:
        step = self._ring.words[ControlLine.STEP * LINE_WORDS]
        if step != self._step:
            self._step = None
            if not self._take_step():
                return False
            self._step = step
        return self._end <= min(self._rows.blocks(len(self._caches[0][0])), self._ring.granted)

    def _take_step(self) -> bool:
        """Copy the step's metadata and check the copy, which the borrower cannot change."""
        words, step = self._ring.words, ControlLine.STEP * LINE_WORDS
        count, work = words[step + 1], words[step + 3]
        if work not in (RingTask.WRITE, RingTask.READ) or not 1 <= count <= self._ring.most_copied:
            return False
        blocks = self._ring.areas.block_table[0, :count].tolist()
        if min(blocks) < 0:
            return False
        self._work, self._end = RingTask(work), 1 + max(blocks)
        self._blocks = [self._rows.of(block) for block in blocks]
        return True

    def _copy(self, caches: tuple[Tensor, Tensor]) -> None:
        for rows, cache in zip(self._ring.copied(len(self._blocks)), caches, strict=True):
            for row, block in zip(rows, self._blocks, strict=True):
                into, out_of = (
                    (cache[block], row) if self._work is RingTask.WRITE else (row, cache[block])
                )
                into.copy_(out_of)
