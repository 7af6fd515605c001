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
    CONTEXT_TILE,
    LIMIT,
    PART_TILES,
    PICKED_UP,
    SERVING,
    LenderMemory,
    attend_rows,
    first_of_block,
    most_parts,
    padded_group,
    padded_head,
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
from loomserve.platform.lending.cuda.kernel import compile_for, kernel, launch, now_ns

PROGRAMS = 512
"""The most of a kernel; each has as many rows, or parts of contexts, as there are for it."""
ROW_TILE = 1024
_OF_SHAPE = (
    "layers",
    "max_rows",
    "max_requests",
    "max_blocks",
    "scale",
    "kv_heads",
    "head_size",
    "block_size",
)
"""What kernels take of a shape as it is."""


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
    """Take the task behind ``served``, if one is posted; what may not be closes the loan.

    Who takes blocks back waits for what is queued before others use them, so what is granted is
    read once a task: a GPU reads the host's memory a word at a time, some microsecond each.
    """
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

    Args:
        granted: int64 [1], blocks of the loan that the borrower may use, of ``blocks``.

    One program. What may not be closes the loan as refused.
    """
    served = tl.load(state + NUMBER)
    take_task(posted, granted, closed, state, served, blocks, layers, max_rows)


@kernel()
def write_units(
    first: tl.tensor,
    programs: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    caches: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    block_stride: tl.tensor,
    abreast_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    abreast: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write keys and values of program ``first`` of ``programs`` into their slots, if those are the
    borrower's."""
    for row in range(first, tl.load(state + ROWS, volatile=True).to(tl.int32), programs):
        slot = tl.load(slots + row)
        limit = tl.load(state + LIMIT, volatile=True)
        if (slot >= 0) & (slot // block_size < limit):
            at = caches + 2 * tl.load(state + LAYER)
            kind = key.dtype
            key_cache = tl.load(at).to(kind)
            value_cache = tl.load(at + 1).to(kind)
            to = (
                first_of_block(slot // block_size, abreast, block_stride, abreast_stride)
                + slot % block_size * token_stride
            )
            for begin in range(0, width, tile):
                place = begin + tl.arange(0, tile)
                inside = place < width
                into = to + (place // head_size).to(tl.int64) * head_stride + place % head_size
                keys = tl.load(key + row * width + place, mask=inside)
                values = tl.load(value + row * width + place, mask=inside)
                tl.store(key_cache + into, keys, mask=inside)
                tl.store(value_cache + into, values, mask=inside)
        else:
            refuse(closed, state)


@kernel()
def write_rows(
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    caches: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    block_stride: tl.tensor,
    abreast_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    abreast: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    row_tile: tl.constexpr,
) -> None:
    """Write the rows of a task, if there is one; any number of programs divides them.

    Args:
        key: [rows, width]; ``value``, too.

    The others are as of :func:`~loomserve.platform.lending.cuda.attention.attend_rows`.
    """
    if tl.load(state + SERVING) != tl.load(state + NUMBER):
        write_units(
            tl.program_id(0),
            tl.num_programs(0),
            key,
            value,
            slots,
            caches,
            closed,
            state,
            block_stride,
            abreast_stride,
            head_stride,
            token_stride,
            abreast,
            head_size,
            width,
            block_size,
            row_tile,
        )


class DeviceLender:
    """A lender's end of one loan: queues kernels that serve the task which is posted, if one is.

    Which stream, and when, is the caller's: a stream of high priority when the host saw the flag,
    or the model's own between two operators. What was queued must have ended before memory that the
    borrower had is used for anything else.
    """

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
        """
        Args:
            shape: of the borrower's attention.
            buffer: as this end has it mapped.
            caches: key and value cache of each of the borrower's layers in the lender's memory,
                [rows, kv_heads, block_size, head_size]; all of the same strides, and the last
                dimension contiguous.
            granted: int64 [1], blocks that the borrower may use now, where the kernels read it.
            memory: its own, if not made here.
            part_tiles: the least tiles of a part of a context.
            abreast: blocks that lie beside one another.
            apart: rows of the caches from one of them to the next.

        Raises:
            ValueError: the caches are not of the shape, or do not begin where they may.
        """
        _check(caches, shape)
        self._shape = shape
        # So that they live as long as their addresses.
        self._caches = caches
        key = caches[0][0]
        block_stride, head_stride, token_stride = key.stride()[:3]
        addresses = [[one.data_ptr() for one in pair] for pair in caches]
        memory = LenderMemory.allocate(shape, key.device) if memory is None else memory
        self.state = memory.state
        self._launch = launch
        self._parts = most_parts(shape, part_tiles)
        self._arguments: dict[str, Any] = {
            **buffer._asdict(),
            "caches": torch.tensor(addresses, dtype=torch.int64, device=key.device),
            "granted": granted,
            **memory._asdict(),
            "blocks": (len(key) - (abreast - 1) * apart) * abreast,
            "block_stride": block_stride,
            "abreast": abreast,
            "abreast_stride": apart * block_stride,
            "head_stride": head_stride,
            "token_stride": token_stride,
            **{name: getattr(shape, name) for name in _OF_SHAPE},
            "width": shape.key_width,
            "group": shape.query_heads // shape.kv_heads,
            "padded_group": padded_group(shape),
            "padded_head": padded_head(shape),
            "row_tile": ROW_TILE,
            "context_tile": CONTEXT_TILE,
            "part_tiles": part_tiles,
            "most_parts": self._parts,
        }

    def queue(self, kernel: Any, grid: tuple[int, ...], **more: Any) -> None:
        """Queue one of the lender's kernels, which takes what it needs of the loan by name."""
        named = {name: self._arguments[name] for name in kernel.arg_names if name not in more}
        self._launch(kernel, grid, **named, **more)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within, kernels are compiled, which takes seconds at the first, and not queued."""
        self._launch = compile_for
        try:
            yield
        finally:
            self._launch = launch

    def poll(self) -> None:
        """Queue a look for a task: one program of one warp."""
        self.queue(poll_task, (1,), num_warps=1)

    def attend(self, rows: int | None = None) -> None:
        """Queue the service of what :meth:`poll` took before on this stream.

        Args:
            rows: at least the task's, if the host knows them; else room is made for the most.
        """
        rows = self._shape.max_rows if rows is None else rows
        units = rows * self._shape.kv_heads * self._parts
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
