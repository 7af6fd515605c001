"""The borrower's end of a task ring: posts rows of its batch, and fetches their attention."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from loomserve.platform.lending.ring import native
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, ControlLine, RingTask


class Borrower:
    """A worker's end of one ring, for the thread that runs its model. Call :meth:`begin_step` once
    a step, then for each layer :meth:`post`, own work, :meth:`wait`. Between steps, blocks are
    copied by :meth:`begin_copy`, then :meth:`write` or :meth:`read`. Once the ring is closed,
    nothing is posted and each wait is False at once."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._in_flight = False
        # The part of the step's metadata that copies of blocks overwrite.
        self._step: tuple[int, int, torch.Tensor] | None = None
        self._number = ring.counter(ControlLine.STEP)
        self._tokens = 0
        ring.words[ControlLine.BORROWER * LINE_WORDS] = os.getpid()
        self._end = native.extension().Borrower(native.mapped(ring))

    def begin_step(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write what the rows of this step's tasks are, as in vLLM's attention metadata.
        ``query_start_loc`` is int32 [requests + 1], counted from these rows' first; ``seq_lens``
        int32 [requests], with this step's tokens; ``block_table`` int32 [requests, up to
        ``ring.max_blocks``] in the loan's own numbering; ``slot_mapping`` int64 [tokens], block *
        block size + place in the block. Raises RuntimeError if a task is in flight; ValueError if
        the step is larger than the ring."""
        ring, requests, tokens = self.ring, len(seq_lens), len(slot_mapping)
        width = block_table.shape[1]
        if self._in_flight:
            raise RuntimeError("a task is in flight: wait for it before a step begins")
        if requests > ring.max_requests or tokens > ring.max_tokens or width > ring.max_blocks:
            raise ValueError(
                f"a step of {tokens} tokens and {requests} requests of {width} blocks exceeds the "
                f"ring's {ring.max_tokens}, {ring.max_requests} and {ring.max_blocks}"
            )
        ring.areas.query_start_loc[: requests + 1] = query_start_loc
        ring.areas.seq_lens[:requests] = seq_lens
        ring.areas.block_table[:requests, :width] = block_table
        ring.areas.slot_mapping[:tokens] = slot_mapping
        self._step = requests, tokens, block_table[0]
        self._begin(requests, tokens, RingTask.ATTEND)

    def resume_step(self) -> None:
        """Go on with the step's tasks after blocks were copied within it."""
        if self._step is not None:
            requests, tokens, first_row = self._step
            self.ring.areas.block_table[0, : len(first_row)] = first_row
            self._begin(requests, tokens, RingTask.ATTEND)

    def _begin(self, requests: int, tokens: int, task: RingTask) -> None:
        step = ControlLine.STEP * LINE_WORDS
        self._number += 1
        self._tokens = tokens
        self.ring.words[step] = self._number
        self.ring.words[step + 1] = requests
        self.ring.words[step + 2] = tokens
        self.ring.words[step + 3] = task

    def begin_copy(self, blocks: Sequence[int], task: RingTask) -> None:
        """Write which of the loan's blocks the next calls of :meth:`write` or :meth:`read` copy.
        Raises RuntimeError if a task is in flight; ValueError if they are none, or more than
        ``ring.most_copied``."""
        if self._in_flight:
            raise RuntimeError("a task is in flight: wait for it before a step begins")
        if not 0 < len(blocks) <= self.ring.most_copied:
            raise ValueError(f"{len(blocks)} blocks are not 1 to {self.ring.most_copied}")
        self.ring.areas.block_table[0, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self._copied = self.ring.copied(len(blocks))
        self._begin(len(blocks), 0, task)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, timeout_s: float) -> bool:
        """Copy one layer of the blocks into the lender's memory; False if the ring is closed.
        ``key`` and ``value`` are [blocks, kv_heads, block_size, head_size], as in a cache."""
        self._copied[0].copy_(key)
        self._copied[1].copy_(value)
        return bool(self._end.copy(layer, timeout_s))

    def read(self, layer: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copy one layer of the blocks from the lender's memory; None if the ring is closed. Key
        and value are as :meth:`write` takes them, in the ring until its next task."""
        return self._copied if self._end.copy(layer, timeout_s) else None

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hand the step's rows of one layer to the lender. ``query`` is [tokens, query_heads,
        head_size] of the geometry's dtype, ``key`` and ``value`` are [tokens, kv_heads, head_size];
        the last dimension is contiguous. ``RuntimeError`` if a task is in flight, or the tensors
        are not of this step and geometry."""
        if self._in_flight:
            raise RuntimeError("a task is in flight: wait for it before the next is posted")
        self._end.post(layer, self._tokens, query, key, value)
        self._in_flight = True

    def through_layers(
        self, hidden: torch.Tensor, residual: torch.Tensor, timeout_s: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Have the lender compute its layers of the step's rows; None if the ring is closed. Takes
        and returns hidden states and residual, [tokens, hidden_size] of the geometry's dtype, no
        wider than a row of queries."""
        tokens, width = hidden.shape
        query, output = (
            area[:tokens].view(tokens, -1)[:, :width]
            for area in (self.ring.areas.query, self.ring.areas.output)
        )
        query.copy_(hidden)
        output.copy_(residual)
        begin = time.monotonic_ns()
        if not self._end.copy(0, timeout_s):
            return None
        self.ring.count(0, 1)
        self.ring.count(2, time.monotonic_ns() - begin)
        return output.clone(), query.clone()

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        """Copy the posted task's attention into ``output``, [tokens, query_heads, head_size] or
        [tokens, query_heads * head_size]. False if the ring is closed; ``output`` is then
        unchanged. After ``timeout_s`` the ring is closed as TIMED_OUT; a halt of this thread counts
        for 10 ms at most. A lender whose process is gone closes it as DIED within some
        milliseconds."""
        self._in_flight = False
        return bool(self._end.wait(output, timeout_s))
