"""A ring as its lender's Python serves it: takes a task, checks it, and does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loomserve.platform.lending.policy.layout import Rows
from loomserve.platform.lending.ring.lent_ring import STATS, LentRing
from loomserve.platform.lending.ring.ring import RingPeer
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingTask

POLLED, IDLED, SERVICE_NS, PICKUP_NS = range(4)
"""The lender's counters."""

Caches = Sequence[tuple[Tensor, Tensor]]
ComputeLayers = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Computes whole layers of a borrower's batch.

Takes hidden states and residual in the ring's ``query`` and ``output``, then query_start_loc,
seq_lens, block_table, slot_mapping and the metadata of vLLM's kernel. Leaves hidden states and
residual in ``output`` and ``query``."""


class ServedRing:
    """One ring, and the step that its borrower is in; of its tasks it serves copies of blocks."""

    def __init__(self, ring: LentRing, caches: Caches, rows: Rows) -> None:
        self.borrower = RingPeer(ring, ControlLine.BORROWER)
        self._rows = rows
        self._ring = ring
        self._caches = caches
        self._done = ring.words[ControlLine.DONE * LINE_WORDS]
        self._done_at = time.monotonic_ns()
        self._step: int | None = None
        self._end = 0
        self.written = 0
        """Blocks from it on hold nothing of the borrower's."""
        self._work = RingTask.ATTEND
        self._blocks: list[int] = []

    def serve(self, counter: int) -> bool:
        """Serve at most one task; False if none is there."""
        ring, words, posted = self._ring, self._ring.words, ControlLine.POSTED * LINE_WORDS
        number = words[posted]
        if number == self._done or ring.closed is not Closed.OPEN:
            return False
        begin, layer = time.monotonic_ns(), words[posted + 1]
        if (
            number != self._done + 1
            or not 0 <= layer < len(self._caches)
            or not self._step_is_valid()
        ):
            ring.shut(Closed.REFUSED)
            return False
        self.written = max(self.written, self._end)
        if self._work is RingTask.ATTEND:
            self._attend(*self._caches[layer])
            self.count(counter, 1)
            self.count(SERVICE_NS, time.monotonic_ns() - begin)
            # No task is posted before the one before it is done.
            self.count(PICKUP_NS, begin - min(max(words[posted + 2], self._done_at), begin))
        else:
            self._copy(self._caches[layer])
        self._done_at = time.monotonic_ns()
        self._done = words[ControlLine.DONE * LINE_WORDS] = number
        return True

    def wrote(self, end: int) -> None:
        """Note that blocks before this one may hold what the borrower had written otherwise."""
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
        requests, tokens, work = self._ring.words[
            ControlLine.STEP * LINE_WORDS + 1 : ControlLine.STEP * LINE_WORDS + 4
        ]
        if work in (RingTask.WRITE, RingTask.READ):
            return self._take_copy(requests, RingTask(work))
        self._work = RingTask.ATTEND
        return work == RingTask.ATTEND and self._take_rows(requests, tokens)

    def _take_rows(self, requests: int, tokens: int) -> bool:
        return False

    def _take_copy(self, blocks: int, work: RingTask) -> bool:
        if not 1 <= blocks <= self._ring.most_copied:
            return False
        self._work = work
        self._blocks = self._ring.areas.block_table[0, :blocks].tolist()
        if min(self._blocks) < 0:
            return False
        self._end = 1 + max(self._blocks)
        self._blocks = [self._rows.of(block) for block in self._blocks]
        return True

    def _copy(self, caches: tuple[Tensor, Tensor]) -> None:
        for rows, cache in zip(self._ring.copied(len(self._blocks)), caches, strict=True):
            for row, block in zip(rows, self._blocks, strict=True):
                into, out_of = (
                    (cache[block], row) if self._work is RingTask.WRITE else (row, cache[block])
                )
                into.copy_(out_of)

    def _attend(self, key_cache: Tensor, value_cache: Tensor) -> None:
        raise NotImplementedError


class AttendedRing(ServedRing):
    """One whose rows are computed by vLLM's CPU kernel, or through hosted layers."""

    def __init__(
        self,
        ring: LentRing,
        split_kv: bool,
        caches: Caches,
        layers: ComputeLayers | None,
        rows: Rows,
    ) -> None:
        super().__init__(ring, caches, rows)
        self._layers = layers
        self._split_kv = split_kv
        self._metadata: Tensor | None = None

    def _take_rows(self, requests: int, tokens: int) -> bool:
        ring, areas, block_size = self._ring, self._ring.areas, self._ring.geometry.block_size
        if not (1 <= requests <= ring.max_requests and 1 <= tokens <= ring.max_tokens):
            return False
        self._starts = areas.query_start_loc[: requests + 1].clone()
        self._lens = areas.seq_lens[:requests].clone()
        self._table = areas.block_table[:requests].clone()
        self._slots = areas.slot_mapping[:tokens].clone()
        # No sum of these may wrap around.
        added, lens = self._starts.long().diff(), self._lens.long()
        used = (lens + block_size - 1) // block_size
        if (
            self._starts[0] != 0
            or self._starts[-1] != tokens
            or added.min() < 1
            or (lens - added).min() < 0
            or used.max() > ring.max_blocks
        ):
            return False
        blocks = self._table[torch.arange(ring.max_blocks) < used[:, None]]
        if min(blocks.min(), self._slots.min()) < 0:
            return False
        self._end = 1 + int(max(blocks.max(), self._slots.max() // block_size))
        self._slots = (
            self._rows.of(self._slots // block_size) * block_size + self._slots % block_size
        )
        self._table = self._rows.of(self._table)
        geometry = ring.geometry
        self._metadata = torch.ops._C.get_scheduler_metadata(
            requests,
            geometry.query_heads,
            geometry.kv_heads,
            geometry.head_size,
            self._lens,
            areas.query.dtype,
            self._starts,
            True,
            geometry.sliding_window,
            geometry.isa,
            self._split_kv,
            None,
            "auto",
        )
        return True

    def _attend(self, key_cache: Tensor, value_cache: Tensor) -> None:
        areas, geometry, tokens = self._ring.areas, self._ring.geometry, len(self._slots)
        if self._layers is not None:
            assert self._metadata is not None
            self._layers(
                areas.query[:tokens], areas.output[:tokens], self._starts, self._lens,
                self._table, self._slots, self._metadata,
            )  # fmt: skip
            return
        torch.ops._C.cpu_attn_reshape_and_cache(
            areas.key[:tokens],
            areas.value[:tokens],
            key_cache,
            value_cache,
            self._slots,
            geometry.isa,
            1.0,
            1.0,
            "auto",
        )
        torch.ops._C.cpu_attention_with_kv_cache(
            areas.query[:tokens],
            key_cache,
            value_cache,
            areas.output[:tokens],
            self._starts,
            self._lens,
            geometry.scale,
            True,
            None,
            geometry.sliding_window,
            self._table,
            geometry.softcap,
            self._metadata,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
