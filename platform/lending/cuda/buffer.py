"""The task buffer of one loan between GPUs, and the words by which its two ends meet.

It is what the ring's areas are between CPUs (:mod:`loomserve.platform.lending.ring.ring`), and one
task is in it at a time, likewise. Each end polls its own memory and writes into the other's::

    borrower: post            writes query, key, value → stores ``posted = n`` (release, system)
    → lender: poll            loads ``posted = n`` (acquire, system)
    → lender: write, attend   write KV, then the borrower's output
                              → store ``done = n`` (release, system)
    → borrower: wait          loads ``done = n`` (acquire, system)
    → borrower: fetch         reads the output
    → borrower: the next task's post, or the next step's metadata

A kernel of many programs publishes by its last one: each program writes, passes a barrier and
counts itself (acquire and release, system); who finds that all others have counted themselves
stores the flag. Release is cumulative in PTX's memory model (PTX ISA, "Memory Consistency Model",
causality order), so the flag orders the writes of all programs. Kernels on one stream follow each
other, so what ``poll`` acquired holds for ``write`` and ``attend`` behind it.

The flags are stored by one thread (``st.release.sys``), and each is read by the GPU that has it, so
that no atomic crosses a link: those between GPUs on PCIe mostly have none.

**Trust.** The lender believes nothing that it reads here: each number is loaded into a register,
checked there, and that register is used. Its own state is in memory that no borrower maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from loomserve.platform.lending.ring.fields import Fields, nbytes_of, views
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed

_ALIGNED = 256
"""Bytes at whose multiples each tensor begins."""

# The line ``posted``, which the borrower writes, and ``done``, which the lender writes.
NUMBER = tl.constexpr(0)
LAYER = tl.constexpr(1)
ROWS = tl.constexpr(2)
POSTED_AT = tl.constexpr(3)
PICKED_UP_AT = tl.constexpr(1)
FINISHED_AT = tl.constexpr(2)

# The values of ``closed`` that kernels write.
TIMED_OUT = tl.constexpr(Closed.TIMED_OUT.value)
REFUSED = tl.constexpr(Closed.REFUSED.value)


@dataclass(frozen=True)
class TaskShape:
    """The geometry of a borrower's attention, and the most that one step has. Activations and KV
    have the same ``dtype``. The kernels know neither sliding windows nor soft caps. ``ValueError``
    if the kernels cannot compute this."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    scale: float
    max_rows: int
    max_requests: int
    max_blocks: int

    def __post_init__(self) -> None:
        counts = (self.layers, self.kv_heads, self.max_rows, self.max_requests, self.max_blocks)
        if min(counts) < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"no attention has this geometry: {self}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"a block of {self.block_size} tokens is no power of two")
        if self.head_size < 16:
            raise ValueError(f"heads of {self.head_size} are too small for the matrix units: 16")

    @property
    def query_width(self) -> int:
        return self.query_heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def padded_head(self) -> int:
        return 1 << (self.head_size - 1).bit_length()

    @property
    def padded_group(self) -> int:
        """Query heads of a KV head, as a power of two of at least 16, which matrix units take."""
        return max(16, 1 << (self.query_heads // self.kv_heads - 1).bit_length())


class TaskBuffer(NamedTuple):
    """The tensors of one loan, as each end has them mapped. The borrower writes those up to
    ``value``, in the lender's memory; the lender writes ``done`` and ``output``, in the borrower's.
    ``closed`` is in either's, or the host's. Times are ns of the writer's clock."""

    posted: torch.Tensor  # number of the last task, its layer, its rows, when it was posted
    requests: torch.Tensor  # the row of block_table of each row of the batch
    contexts: torch.Tensor  # tokens of its request that a row attends to, itself included
    block_table: torch.Tensor  # in the loan's own numbering of blocks
    slots: torch.Tensor  # block * block_size + place in the block, of a row's own KV
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    done: torch.Tensor  # number of the last task done, when it was picked up, and finished
    output: torch.Tensor
    closed: torch.Tensor  # int64 [1], 0 while the loan is open

    @classmethod
    def over(
        cls, shape: TaskShape, lender: torch.Tensor, borrower: torch.Tensor, closed: torch.Tensor
    ) -> TaskBuffer:
        """Lay a buffer over flat memory, uint8 [:func:`lender_bytes`] and uint8
        [:func:`borrower_bytes`], of zeros at first; ``closed`` is int64 [1]."""
        return cls(
            **views(_of_lender(shape), lender, _ALIGNED),
            **views(_of_borrower(shape), borrower, _ALIGNED),
            closed=closed,
        )

    @classmethod
    def allocate(cls, shape: TaskShape, lender: str, borrower: str) -> TaskBuffer:
        """Make a buffer of zeros within one process, ``closed`` beside the borrower."""
        return cls.over(
            shape,
            torch.zeros(lender_bytes(shape), dtype=torch.uint8, device=lender),
            torch.zeros(borrower_bytes(shape), dtype=torch.uint8, device=borrower),
            torch.zeros(1, dtype=torch.int64, device=borrower),
        )


def lender_bytes(shape: TaskShape) -> int:
    return nbytes_of(_of_lender(shape), _ALIGNED)


def borrower_bytes(shape: TaskShape) -> int:
    return nbytes_of(_of_borrower(shape), _ALIGNED)


def _of_lender(shape: TaskShape) -> Fields:
    rows = shape.max_rows
    keys = (rows, shape.kv_heads, shape.head_size)
    return {
        "posted": (torch.int64, (LINE_WORDS,)),
        "requests": (torch.int32, (rows,)),
        "contexts": (torch.int32, (rows,)),
        "block_table": (torch.int32, (shape.max_requests, shape.max_blocks)),
        "slots": (torch.int64, (rows,)),
        "query": (shape.dtype, (rows, shape.query_heads, shape.head_size)),
        "key": (shape.dtype, keys),
        "value": (shape.dtype, keys),
    }


def _of_borrower(shape: TaskShape) -> Fields:
    return {
        "done": (torch.int64, (LINE_WORDS,)),
        "output": (shape.dtype, (shape.max_rows, shape.query_heads, shape.head_size)),
    }
