"""The lender's kernels: look for a task, write its KV into lent blocks, compute its attention.

Three, since each must have ended before the next may read: ``write`` needs one answer to whether
there is a task, and rows of one request attend to keys that other rows' programs wrote. Without a
task the two behind ``poll`` end at once, so all three may be queued, or captured, anywhere. The
third is in :mod:`~loomserve.platform.lending.cuda.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton.language as tl

from loomserve.platform.lending.cuda.attention import (
    ALIGNED_BYTES,
    ATTENDING,
    LIMIT,
    PART_TILES,
    PICKED_UP,
    SERVING,
    Fixed,
    LenderMemory,
    Strides,
    attend_rows,
    first_of_block,
    refuse,
)
from loomserve.platform.lending.cuda.buffer import (
    LAYER,
    NUMBER,
    REFUSED,
    ROWS,
    TaskBuffer,
    TaskShape,
)
from loomserve.platform.lending.cuda.kernel import Launch, compile_for, kernel, launch, now_ns

PROGRAMS = 512
"""The most of a kernel; each has as many rows, or parts of contexts, as there are for it."""


@kernel()
def take_task(
    posted: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    served: tl.tensor,
    blocks: tl.tensor,
    layers: tl.tensor,
    max_rows: tl.tensor,
) -> None:
    """Take the task behind ``served``, if one is posted; what may not be closes the loan. Who takes
    blocks back waits for what is queued before others use them, so what is granted is read once a
    task: a GPU reads the host's memory a word at a time, some microsecond each."""
    number = tl.atomic_add(posted + NUMBER, 0, sem="acquire", scope="sys")
    # Its word is in the other end's memory, so it is read only for a task.
    if tl.load(closed, mask=number != served, other=1, volatile=True) == 0:
        layer = tl.load(posted + LAYER, volatile=True)
        rows = tl.load(posted + ROWS, volatile=True)
        known = (layer >= 0) & (layer < layers) & (rows >= 1) & (rows <= max_rows)
        if known & (number == served + 1):
            tl.store(state + LAYER, layer)
            tl.store(state + ROWS, rows)
            tl.store(state + PICKED_UP, now_ns())
            tl.store(state + LIMIT, tl.minimum(tl.load(granted, volatile=True), blocks))
            tl.debug_barrier()
            tl.atomic_xchg(state + SERVING, number, sem="release", scope="gpu")
        else:
            tl.store(closed, tl.full((), REFUSED, tl.int64))


@kernel("blocks", "layers", "max_rows")
def poll_task(
    posted: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    blocks: tl.tensor,
    layers: tl.tensor,
    max_rows: tl.tensor,
) -> None:
    """Take the task that is posted, if one is and its number, layer and rows are what they may be.
    One program. ``granted`` is int64 [1], the blocks of the loan that the borrower may use. What
    may not be closes the loan as refused."""
    served = tl.load(state + NUMBER)
    take_task(posted, granted, closed, state, served, blocks, layers, max_rows)


@kernel()
def write_units(
    first: tl.tensor,
    programs: tl.tensor,
    buffer: tl.tuple,
    state: tl.tensor,
    caches: tl.tensor,
    strides: tl.tuple,
    fixed: tl.constexpr,
) -> None:
    """Write keys and values of program ``first`` of ``programs`` into their slots, if those are the
    borrower's."""
    width: tl.constexpr = fixed.width
    for row in range(first, tl.load(state + ROWS, volatile=True).to(tl.int32), programs):
        slot = tl.load(buffer.slots + row)
        limit = tl.load(state + LIMIT, volatile=True)
        if (slot >= 0) & (slot // fixed.block_size < limit):
            at = caches + 2 * tl.load(state + LAYER)
            kind = buffer.key.dtype
            key_cache = tl.load(at).to(kind)
            value_cache = tl.load(at + 1).to(kind)
            to = (
                first_of_block(slot // fixed.block_size, strides, fixed.abreast)
                + slot % fixed.block_size * strides.token
            )
            for begin in range(0, width, fixed.row_tile):
                place = begin + tl.arange(0, fixed.row_tile)
                inside = place < width
                head = (place // fixed.head_size).to(tl.int64)
                into = to + head * strides.head + place % fixed.head_size
                keys = tl.load(buffer.key + row * width + place, mask=inside)
                values = tl.load(buffer.value + row * width + place, mask=inside)
                tl.store(key_cache + into, keys, mask=inside)
                tl.store(value_cache + into, values, mask=inside)
        else:
            refuse(buffer.closed, state)


@kernel()
def write_rows(
    buffer: tl.tuple, state: tl.tensor, caches: tl.tensor, strides: tl.tuple, fixed: tl.constexpr
) -> None:
    """Write the rows of a task, if there is one; any number of programs divides them. Arguments are
    those of :func:`~loomserve.platform.lending.cuda.attention.attend_rows`."""
    if tl.load(state + SERVING) != tl.load(state + NUMBER):
        write_units(tl.program_id(0), tl.num_programs(0), buffer, state, caches, strides, fixed)


class DeviceLender:
    """A lender's end of one loan: queues kernels that serve the task which is posted, if one is.
    The caller chooses stream and time: a stream of high priority when the host saw the flag, or the
    model's own between two operators. What was queued must have ended before memory that the
    borrower had is used for anything else."""

    def __init__(
        self,
        shape: TaskShape,
        buffer: TaskBuffer,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        granted: torch.Tensor,
        memory: LenderMemory | None = None,
        part_tiles: int = PART_TILES,
        abreast: int = 1,
        apart: int = 0,
    ) -> None:
        """``caches`` are the key and value cache of each of the borrower's layers, [rows, kv_heads,
        block_size, head_size], all of the same strides, the last dimension contiguous. ``abreast``
        blocks lie beside one another, ``apart`` rows from one to the next. ``granted``, int64 [1],
        is where kernels read how many blocks the borrower may use. ``ValueError`` if the caches are
        not of the shape, or do not begin where they may."""
        _check(caches, shape)
        self._shape = shape
        # So that they live as long as their addresses.
        self._caches = caches
        key = caches[0][0]
        block_stride, head_stride, token_stride = key.stride()[:3]
        addresses = [[one.data_ptr() for one in pair] for pair in caches]
        memory = LenderMemory.allocate(shape, key.device) if memory is None else memory
        self.state = memory.state
        self._launch: Launch = launch
        self._fixed = Fixed.of(shape, abreast, part_tiles)
        self._arguments: dict[str, Any] = {
            "buffer": buffer,
            "posted": buffer.posted,
            "closed": buffer.closed,
            "granted": granted,
            "memory": memory,
            "state": memory.state,
            "caches": torch.tensor(addresses, dtype=torch.int64, device=key.device),
            "strides": Strides(block_stride, apart * block_stride, head_stride, token_stride),
            "blocks": (len(key) - (abreast - 1) * apart) * abreast,
            "layers": shape.layers,
            "max_rows": shape.max_rows,
            "max_requests": shape.max_requests,
            "max_blocks": shape.max_blocks,
            "fixed": self._fixed,
        }

    def queue(self, kernel: Any, grid: tuple[int, ...], **more: Any) -> None:
        """Queue one of the lender's kernels, which takes what it needs by name."""
        named = {name: self._arguments[name] for name in kernel.arg_names if name not in more}
        self._launch(kernel, grid, **named, **more)

    @contextmanager
    def compiling(self, how: Launch = compile_for) -> Iterator[None]:
        """Within, kernels are compiled, which takes seconds at the first, and not queued."""
        self._launch = how
        try:
            yield
        finally:
            self._launch = launch

    def poll(self) -> None:
        self.queue(poll_task, (1,), num_warps=1)

    def attend(self, rows: int | None = None) -> None:
        """Queue the service of what :meth:`poll` took before on this stream. ``rows``: at least the
        task's, if the host knows them; else room is made for the most."""
        rows = self._shape.max_rows if rows is None else rows
        units = rows * self._shape.kv_heads * self._fixed.most_parts
        self.queue(write_rows, (min(rows, PROGRAMS),))
        self.queue(attend_rows, (min(units, PROGRAMS),), **ATTENDING)

    def serve(self, rows: int | None = None) -> None:
        """Queue a look and, behind it, the service of what it finds."""
        self.poll()
        self.attend(rows)


def _check(caches: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: TaskShape) -> None:
    inner = (shape.kv_heads, shape.block_size, shape.head_size)
    first = caches[0][0]
    for cache in (one for pair in caches for one in pair):
        if (
            cache.shape != (len(first), *inner)
            or cache.stride() != first.stride()
            or cache.stride(3) != 1
            or cache.dtype != shape.dtype
        ):
            raise ValueError(
                f"a KV cache of {cache.dtype} {tuple(cache.shape)}, strides {cache.stride()} is "
                f"not of the borrower's {shape}, or not like the others"
            )
        if cache.data_ptr() % ALIGNED_BYTES:
            raise ValueError(f"a KV cache does not begin at a multiple of {ALIGNED_BYTES} bytes")
    if len(caches) != shape.layers:
        raise ValueError(f"KV caches of {len(caches)} layers for {shape.layers}")
