"""The lender's kernels: look for a task, write its KV into lent blocks, compute its attention.

Three, since each must have ended before the next may read: ``write`` needs one answer to whether
there is a task, and rows of one request attend to keys that other rows' programs wrote. Without a
task the two behind ``poll`` end at once, so all three may be queued, or captured, anywhere.

The attention is the plain one of decoding: a program a row and KV head, online softmax (Milakov and
Gimelshein, 2018; as FlashAttention) over the row's blocks. Rows of a prefill are right and slow:
each reads its context by itself. Long contexts of few rows leave multiprocessors idle, as a context
is not divided among programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from loomserve.platform.lending.cuda.buffer import (
    FINISHED_AT,
    LAYER,
    LINE_WORDS,
    NUMBER,
    PICKED_UP_AT,
    REFUSED,
    ROWS,
    TaskBuffer,
    TaskShape,
)
from loomserve.platform.lending.cuda.kernel import kernel, now_ns

CONTEXT_TILE = 64
"""Tokens of a context whose logits a program computes at once."""
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

# Words of a lender's own state, int64 in its memory. NUMBER is of the last task that was served or
# refused; LAYER and ROWS are of the one that is being served.
SERVING = tl.constexpr(3)
ARRIVED = tl.constexpr(4)
SPOILED = tl.constexpr(5)
PICKED_UP = tl.constexpr(6)


@kernel()
def take_task(
    posted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    served: tl.tensor,
    layers: tl.tensor,
    max_rows: tl.tensor,
) -> None:
    """Take the task behind ``served``, if one is posted; what may not be closes the loan."""
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
            tl.debug_barrier()
            tl.atomic_xchg(state + SERVING, number, sem="release", scope="gpu")
        else:
            tl.store(closed, tl.full((), REFUSED, tl.int64))


@kernel("layers", "max_rows")
def poll_task(
    posted: tl.tensor, closed: tl.tensor, state: tl.tensor, layers: tl.tensor, max_rows: tl.tensor
) -> None:
    """Take the task that is posted, if one is and its number, layer and rows are what they may be.

    One program. What may not be closes the loan as refused.
    """
    take_task(posted, closed, state, tl.load(state + NUMBER), layers, max_rows)


@kernel()
def refuse(closed: tl.tensor, state: tl.tensor) -> None:
    """Serve no task any more, the present one included."""
    tl.atomic_xchg(state + SPOILED, 1, sem="relaxed", scope="gpu")
    tl.store(closed, tl.full((), REFUSED, tl.int64))


@kernel()
def write_row(
    row: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    caches: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    blocks: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write a row's key and value into its slot, if that is the borrower's."""
    slot = tl.load(slots + row)
    limit = tl.minimum(tl.load(granted, volatile=True), blocks)
    if (slot >= 0) & (slot // block_size < limit):
        at = caches + 2 * tl.load(state + LAYER)
        kind = key.dtype
        key_cache = tl.load(at).to(kind)
        value_cache = tl.load(at + 1).to(kind)
        to = slot // block_size * block_stride + slot % block_size * token_stride
        for first in range(0, width, tile):
            place = first + tl.arange(0, tile)
            inside = place < width
            into = to + (place // head_size).to(tl.int64) * head_stride + place % head_size
            keys = tl.load(key + row * width + place, mask=inside)
            values = tl.load(value + row * width + place, mask=inside)
            tl.store(key_cache + into, keys, mask=inside)
            tl.store(value_cache + into, values, mask=inside)
    else:
        refuse(closed, state)


@kernel("blocks")
def write_rows(
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    caches: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    blocks: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    row_tile: tl.constexpr,
) -> None:
    """Write a row a program.

    Args:
        key: [rows, width]; ``value``, too.
        caches: int64 [layers, 2], addresses of key and value caches of ``blocks`` blocks, with the
            strides that follow, in numbers of the cache's type.
        granted: int64 [1], blocks of the loan that the borrower may use.
    """
    row = tl.program_id(0)
    if (tl.load(state + SERVING) != tl.load(state + NUMBER)) & (row < tl.load(state + ROWS)):
        write_row(
            row,
            key,
            value,
            slots,
            caches,
            granted,
            closed,
            state,
            blocks,
            block_stride,
            head_stride,
            token_stride,
            head_size,
            width,
            block_size,
            row_tile,
        )


@kernel()
def attend_head(
    row: tl.tensor,
    head: tl.tensor,
    serving: tl.tensor,
    rows: tl.tensor,
    query: tl.tensor,
    requests: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    caches: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    blocks: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Compute the attention of a row and KV head of task ``serving``, which has ``rows`` rows; the
    last of all publishes the answer."""
    request = tl.load(requests + row)
    context = tl.load(contexts + row)
    limit = tl.minimum(tl.load(granted, volatile=True), blocks)
    known = (request >= 0) & (request < max_requests)
    known = known & (context >= 1) & (context <= max_blocks * block_size)
    # A row that is refused has no context, so that nothing of it is read.
    context = tl.where(known, context, 0)
    request = tl.where(known, request, 0)
    at = caches + 2 * tl.load(state + LAYER)
    key_cache = tl.load(at).to(query.dtype)
    value_cache = tl.load(at + 1).to(query.dtype)

    places = tl.arange(0, padded_head)
    heads = tl.arange(0, padded_group)
    inside_head = places < head_size
    inside_group = heads < group
    at_query = (row * kv_heads * group + head * group + heads[:, None]) * head_size
    at_query = at_query + places[None, :]
    own = inside_group[:, None] & inside_head[None, :]
    queries = tl.load(query + at_query, mask=own, other=0.0)

    largest = tl.full((padded_group,), float("-inf"), tl.float32)
    total = tl.zeros((padded_group,), tl.float32)
    gathered = tl.zeros((padded_group, padded_head), tl.float32)
    strange = tl.full((), 0, tl.int32)
    for first in range(0, context, tile):
        tokens = first + tl.arange(0, tile)
        inside = tokens < context
        table = block_table + request.to(tl.int64) * max_blocks + tokens // block_size
        block = tl.load(table, mask=inside, other=0)
        theirs = inside & (block >= 0) & (block < limit)
        strange += tl.sum((inside & (theirs == 0)).to(tl.int32))
        from_block = block.to(tl.int64) * block_stride + tokens % block_size * token_stride
        at_token = from_block[:, None] + tl.cast(head, tl.int64) * head_stride + places[None, :]
        there = theirs[:, None] & inside_head[None, :]
        keys = tl.load(key_cache + at_token, mask=there, other=0.0)
        values = tl.load(value_cache + at_token, mask=there, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(theirs[None, :], logits, float("-inf"))
        higher = tl.maximum(largest, tl.max(logits, 1))
        # Nothing but -inf so far, if all blocks are strange.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        largest = higher
    if known & (strange == 0):
        answer = (gathered / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + at_query, answer, mask=own)
        at_lse = lse + row * kv_heads * group + head * group + heads
        tl.store(at_lse, largest + tl.log(total), mask=inside_group)
    else:
        refuse(closed, state)

    tl.debug_barrier()
    before = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="sys")
    if before == rows * kv_heads - 1:
        tl.store(state + ARRIVED, 0)
        tl.store(state + NUMBER, serving)
        if tl.atomic_add(state + SPOILED, 0, sem="relaxed", scope="gpu") == 0:
            tl.store(done + PICKED_UP_AT, tl.load(state + PICKED_UP))
            tl.store(done + FINISHED_AT, now_ns())
            tl.debug_barrier()
            tl.atomic_xchg(done + NUMBER, serving, sem="release", scope="sys")


@kernel("blocks", "max_requests", "max_blocks")
def attend_rows(
    query: tl.tensor,
    requests: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    caches: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    blocks: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head: tl.constexpr,
    block_size: tl.constexpr,
    context_tile: tl.constexpr,
) -> None:
    """Compute the attention of a row and KV head a program; the last publishes the answer.

    Args:
        query: [rows, kv_heads * group, head_size]; ``output``, too.
        caches: as of :func:`write_rows`, and so are ``granted`` and strides.
        lse: float32 [rows, kv_heads * group].
        group: query heads of a KV head; padded to 16, the least that matrix units take.

    A row that asks for what is not the borrower's closes the loan, and nothing is published.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    serving = tl.load(state + SERVING)
    rows = tl.load(state + ROWS)
    if (serving != tl.load(state + NUMBER)) & (row < rows):
        attend_head(
            row,
            head,
            serving,
            rows,
            query,
            requests,
            contexts,
            block_table,
            caches,
            granted,
            closed,
            state,
            done,
            output,
            lse,
            blocks,
            max_requests,
            max_blocks,
            block_stride,
            head_stride,
            token_stride,
            scale,
            kv_heads,
            group,
            padded_group,
            head_size,
            padded_head,
            block_size,
            context_tile,
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
        state: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            shape: of the borrower's attention.
            buffer: as this end has it mapped.
            caches: key and value cache of each of the borrower's layers in the lender's memory,
                [blocks, kv_heads, block_size, head_size]; all of the same strides, and the last
                dimension contiguous.
            granted: int64 [1], blocks that the borrower may use now, where the kernels read it.
            state: int64 [LINE_WORDS] of zeros, if not made here.

        Raises:
            ValueError: the caches are not of the shape.
        """
        _check(caches, shape)
        self._shape = shape
        # So that they live as long as their addresses.
        self._caches = caches
        key = caches[0][0]
        block_stride, head_stride, token_stride = key.stride()[:3]
        addresses = [[one.data_ptr() for one in pair] for pair in caches]
        own = torch.zeros(LINE_WORDS, dtype=torch.int64, device=key.device)
        self.state = own if state is None else state
        group = shape.query_heads // shape.kv_heads
        self._arguments: dict[str, Any] = {
            **buffer._asdict(),
            "caches": torch.tensor(addresses, dtype=torch.int64, device=key.device),
            "granted": granted,
            "state": self.state,
            "blocks": len(key),
            "block_stride": block_stride,
            "head_stride": head_stride,
            "token_stride": token_stride,
            **{name: getattr(shape, name) for name in _OF_SHAPE},
            "width": shape.key_width,
            "group": group,
            "padded_group": max(16, 1 << (group - 1).bit_length()),
            "padded_head": 1 << (shape.head_size - 1).bit_length(),
            "row_tile": ROW_TILE,
            "context_tile": CONTEXT_TILE,
        }

    def queue(self, kernel: Any, grid: tuple[int, ...], **more: Any) -> None:
        """Queue one of the lender's kernels, which takes what it needs of the loan by name."""
        named = {name: self._arguments[name] for name in kernel.arg_names if name not in more}
        kernel[grid](**named, **more)

    def poll(self) -> None:
        """Queue a look for a task: one program of one warp."""
        self.queue(poll_task, (1,), num_warps=1)

    def attend(self, rows: int | None = None) -> None:
        """Queue the service of what :meth:`poll` took before on this stream.

        Args:
            rows: at least the task's, if the host knows them; else room is made for the most.
        """
        rows = self._shape.max_rows if rows is None else rows
        self.queue(write_rows, (rows,))
        self.queue(attend_rows, (rows, self._shape.kv_heads))

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
    if len(caches) != shape.layers:
        raise ValueError(f"KV caches of {len(caches)} layers for {shape.layers}")
