"""The borrower's end of a task ring: posts rows of its batch, and fetches their attention."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence

import torch

from loomserve.platform.lending.ring import native
from loomserve.platform.lending.ring.ring import Ring, RingPeer
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingTask

YIELD_NS = 200_000
"""After so many nanoseconds a wait yields the core between two looks."""
LOOK_NS = 1_000_000
"""Nanoseconds between two looks at whether the lender lives."""
LONGEST_LOOK_NS = 10_000_000
"""What lies between two looks counts no longer: meanwhile the borrower had no core, nor perhaps the
lender."""

SYS_FUTEX = 202
"""The system call's number on x86-64, where alone the fallback runs."""


class Borrower:
    """A worker's end of one ring, for the thread that runs its model.

    Call :meth:`begin_step` once a step, then for each layer :meth:`post`, own work, :meth:`wait`.
    Between steps, blocks are copied by :meth:`begin_copy`, then :meth:`write` or :meth:`read`. Once
    the ring is closed, nothing is posted and each wait is False at once.
    """

    def __init__(self, ring: Ring, *, in_python: bool = False) -> None:
        self.ring = ring
        self._in_flight = False
        # The part of the step's metadata that copies of blocks overwrite.
        self._step: tuple[int, int, torch.Tensor] | None = None
        self._number = ring.counter(ControlLine.STEP)
        self._tokens = 0
        ring.words[ControlLine.BORROWER * LINE_WORDS] = os.getpid()
        module = None if in_python else native.extension()
        self._end = module.Borrower(native.mapped(module, ring)) if module else _Fallback(ring)

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
        block size + place in the block.

        Raises:
            RuntimeError: a task is in flight.
            ValueError: the step is larger than the ring.
        """
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

        Raises:
            RuntimeError: a task is in flight.
            ValueError: they are none, or more than ``ring.most_copied``.
        """
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
        """Hand the step's rows of one layer to the lender.

        ``query`` is [tokens, query_heads, head_size] of the geometry's dtype, ``key`` and ``value``
        are [tokens, kv_heads, head_size]; the last dimension is contiguous. ``RuntimeError`` if a
        task is in flight, or the tensors are not of this step and geometry.
        """
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
        unchanged.

        After ``timeout_s`` the ring is closed as TIMED_OUT; a halt of this thread counts for
        ``LONGEST_LOOK_NS`` at most. A lender whose process is gone closes it as DIED within some
        milliseconds.
        """
        self._in_flight = False
        return bool(self._end.wait(output, timeout_s))


class _Fallback:
    """The native end's counterpart in Python, for machines without a compiler."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._posted = ring.counter(ControlLine.POSTED)
        self._lender = RingPeer(ring, ControlLine.LENDER)
        self._fence = threading.Lock()

    def post(
        self, layer: int, tokens: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        ring = self._ring
        if ring.closed is not Closed.OPEN:
            return
        begin = time.monotonic_ns()
        if not len(query) == len(key) == len(value) == tokens:
            raise RuntimeError(f"a task of {len(query)} tokens in a step of {tokens}")
        ring.areas.query[:tokens] = query
        ring.areas.key[:tokens] = key
        ring.areas.value[:tokens] = value
        self._lender.meet()
        self._announce(layer)
        ring.count(0, 1)
        ring.count(1, time.monotonic_ns() - begin)

    def _announce(self, layer: int) -> None:
        words, posted, now = self._ring.words, ControlLine.POSTED * LINE_WORDS, time.monotonic_ns()
        words[posted + 1] = layer
        words[posted + 2] = now
        self._posted += 1
        words[posted] = self._posted
        # A lock's atomic instruction is a full fence on the machines that this runs on.
        with self._fence:
            sleeps = words[ControlLine.SLEEPING * LINE_WORDS]
        if sleeps:
            _wake(self._ring.areas.control[ControlLine.POSTED].data_ptr())
        words[ControlLine.BORROWER * LINE_WORDS + 1] = now

    def copy(self, layer: int, timeout_s: float) -> bool:
        if self._ring.closed is not Closed.OPEN:
            return False
        self._lender.meet()
        self._announce(layer)
        return self._done(time.monotonic_ns(), int(timeout_s * 1e9))

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        ring, words = self._ring, self._ring.words
        begin = time.monotonic_ns()
        if not self._done(begin, int(timeout_s * 1e9)):
            return False
        output.copy_(ring.areas.output[: len(output)].view(output.shape))
        waited, stats = time.monotonic_ns() - begin, ControlLine.BORROWER_STATS * LINE_WORDS
        words[ControlLine.BORROWER * LINE_WORDS + 1] = begin + waited
        ring.count(2, waited)
        words[stats + 3] = max(waited, words[stats + 3])
        return True

    def _done(self, begin: int, timeout: int) -> bool:
        ring, words, done = self._ring, self._ring.words, ControlLine.DONE * LINE_WORDS
        looked, waited = begin, 0
        while ring.closed is Closed.OPEN:
            # Before the look for the result, or a halt of this process would pass for the lender's.
            now = time.monotonic_ns()
            if words[done] == self._posted:
                return True
            if now - looked >= LOOK_NS:
                waited += min(now - looked, LONGEST_LOOK_NS)
                looked = now
                if waited >= timeout:
                    ring.shut(Closed.TIMED_OUT)
                if self._lender.gone():
                    ring.shut(Closed.DIED)
            if now - begin >= YIELD_NS:
                os.sched_yield()
        return False


def _wake(address: int) -> None:
    """Wake all that sleep on the futex there (FUTEX_WAKE)."""
    ctypes.CDLL(None).syscall(SYS_FUTEX, ctypes.c_void_p(address), 1, 2**31 - 1, None, None, 0)
