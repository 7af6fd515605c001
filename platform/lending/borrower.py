"""The borrower's end of a task ring: posts rows of its batch, fetches their attention."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import torch

from loomserve.platform.lending import native
from loomserve.platform.lending.ring import LINE_WORDS, Closed, Line, Peer, Ring

YIELD_NS = 200_000
"""A wait that lasts so long lets others have the core between its looks."""
LOOK_NS = 1_000_000
"""So often it looks whether the lender lives."""

SYS_FUTEX = 202
"""Of x86-64, on which alone the fallback runs."""


class Borrower:
    """A worker's end of one ring, for the thread that runs its model.

    Once a step :meth:`begin_step`, then for each layer :meth:`post`, own work, :meth:`wait`. When
    the ring is closed, whoever closed it, nothing is posted any more and each wait is False at
    once, so that the caller need not ask in every layer.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._in_flight = False
        ring.words[Line.BORROWER * LINE_WORDS] = os.getpid()
        module = native.extension()
        self._end = module.Borrower(native.mapped(module, ring)) if module else _Fallback(ring)

    def begin_step(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Say what the rows of this step's tasks are, as vLLM's attention metadata does.

        Args:
            query_start_loc: int32 [requests + 1], counted from these rows' first.
            seq_lens: int32 [requests], tokens in the cache after this step.
            block_table: int32 [requests, up to ``ring.max_blocks``], guest blocks; nobody looks
                at what stands behind a sequence's last block.
            slot_mapping: int64 [tokens], guest block * block size + place in the block.

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
        step = Line.STEP * LINE_WORDS
        ring.words[step] += 1
        ring.words[step + 1] = requests
        ring.words[step + 2] = tokens

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hand the step's rows of one layer to the lender.

        Args:
            layer: from 0.
            query: [tokens, query_heads, head_size] of the geometry's dtype; the last dimension is
                contiguous, here as in the others.
            key: [tokens, kv_heads, head_size].
            value: like ``key``.

        Raises:
            RuntimeError: a task is in flight, or the tensors are not of this step and geometry.
        """
        if self._in_flight:
            raise RuntimeError("a task is in flight: wait for it before the next is posted")
        self._end.post(layer, query, key, value)
        self._in_flight = True

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        """Copy the posted task's attention into ``output``.

        Args:
            output: [tokens, query_heads, head_size] or [tokens, query_heads * head_size].
            timeout_s: after it the ring is closed as TIMED_OUT. A lender whose process is gone
                closes it as DIED within some milliseconds.

        Returns:
            False if the ring is closed; ``output`` is then as it was.
        """
        self._in_flight = False
        return bool(self._end.wait(output, timeout_s))


class _Fallback:
    """What the extension does, in Python: for machines without a compiler."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._posted = ring.words[Line.POSTED * LINE_WORDS]
        self._lender = Peer(ring, Line.LENDER)
        self._fence = threading.Lock()

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        ring, words = self._ring, self._ring.words
        if ring.closed is not Closed.OPEN:
            return
        begin, tokens = time.monotonic_ns(), words[Line.STEP * LINE_WORDS + 2]
        if not len(query) == len(key) == len(value) == tokens:
            raise RuntimeError(f"a task of {len(query)} tokens in a step of {tokens}")
        ring.areas.query[:tokens] = query
        ring.areas.key[:tokens] = key
        ring.areas.value[:tokens] = value
        self._lender.meet()
        posted, end = Line.POSTED * LINE_WORDS, time.monotonic_ns()
        words[posted + 1] = layer
        words[posted + 2] = end
        self._posted += 1
        words[posted] = self._posted
        # A lock's atomic instruction is a full fence on the machines that this runs on.
        with self._fence:
            sleeps = words[Line.SLEEPING * LINE_WORDS]
        if sleeps:
            _wake(ring.areas.control[Line.POSTED].data_ptr())
        words[Line.BORROWER * LINE_WORDS + 1] = end
        words[Line.BORROWER_STATS * LINE_WORDS] += 1
        words[Line.BORROWER_STATS * LINE_WORDS + 1] += time.monotonic_ns() - begin

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        ring, words = self._ring, self._ring.words
        begin = time.monotonic_ns()
        if not self._done(begin, int(timeout_s * 1e9)):
            return False
        output.copy_(ring.areas.output[: len(output)].view(output.shape))
        waited, stats = time.monotonic_ns() - begin, Line.BORROWER_STATS * LINE_WORDS
        words[Line.BORROWER * LINE_WORDS + 1] = begin + waited
        words[stats + 2] += waited
        words[stats + 3] = max(waited, words[stats + 3])
        return True

    def _done(self, begin: int, timeout: int) -> bool:
        ring, words, done = self._ring, self._ring.words, Line.DONE * LINE_WORDS
        looked = begin
        while ring.closed is Closed.OPEN:
            # Before it looks for the result, lest a halt of this process pass for the lender's.
            now = time.monotonic_ns()
            if words[done] == self._posted:
                return True
            if now - begin >= timeout:
                ring.shut(Closed.TIMED_OUT)
            elif now - looked >= LOOK_NS:
                looked = now
                if self._lender.gone():
                    ring.shut(Closed.DIED)
            if now - begin >= YIELD_NS:
                os.sched_yield()
        return False


def _wake(address: int) -> None:
    """Wake whoever sleeps on the futex there (FUTEX_WAKE, all of them)."""
    ctypes.CDLL(None).syscall(SYS_FUTEX, ctypes.c_void_p(address), 1, 2**31 - 1, None, None, 0)
