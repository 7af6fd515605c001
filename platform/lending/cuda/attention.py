"""The lender's attention: of a row and KV head, over its blocks, divided among programs.

Online softmax (Milakov and Gimelshein, 2018; as FlashAttention), for decoding: a unit of work is a
part of the context of one row and one KV head. Where a step has few rows, a context has several
parts, so that all multiprocessors have work; whoever ends the last of them merges all, by their
LSE (as Flash-Decoding does). Rows of a prefill are right and slow: each reads its context by
itself.
"""

from __future__ import annotations

from typing import NamedTuple

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
    TaskShape,
)
from loomserve.platform.lending.cuda.kernel import kernel, now_ns

CONTEXT_TILE = 64
"""Tokens of a context whose logits a program computes at once."""
ATTENDING = {"num_warps": 2, "num_stages": 2}
"""How :func:`attend_rows` is compiled: of 21 such choices the best for an H200."""
PART_TILES = 4
"""The least tiles of a part, if there are more parts than one."""
MOST_PARTS = 16
"""Of one context."""
MOST_UNITS = 1024
"""Contexts are divided into no more units than these, of all rows and KV heads of a task."""
ALIGNED_BYTES = 16
"""What keys and values begin at multiples of: else a GPU would load them number by number."""

# Words of a lender's own state, int64 in its memory. NUMBER is of the last task that was served or
# refused; LAYER and ROWS are of the one that is being served.
SERVING = tl.constexpr(3)
ARRIVED = tl.constexpr(4)
SPOILED = tl.constexpr(5)
PICKED_UP = tl.constexpr(6)
LIMIT = tl.constexpr(9)
"""Blocks that the borrower might use when the task was taken."""


class LenderMemory(NamedTuple):
    """What a lender's kernels keep between each other, in its own device's memory; zeros at first.

    Attributes:
        state: int64 [LINE_WORDS].
        ended: int32 [MOST_UNITS], how many parts of each context are computed.
        sums: float32 [MOST_UNITS, 2, padded_group], the largest logit of each part, and the sum of
            weights relative to it.
        gathered: float32 [MOST_UNITS, padded_group, padded_head], values by those weights.
    """

    state: torch.Tensor
    ended: torch.Tensor
    sums: torch.Tensor
    gathered: torch.Tensor

    @classmethod
    def allocate(cls, shape: TaskShape, device: torch.device | str) -> LenderMemory:
        group = padded_group(shape)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            zeros(LINE_WORDS, dtype=torch.int64),
            zeros(MOST_UNITS, dtype=torch.int32),
            zeros(MOST_UNITS, 2, group),
            zeros(MOST_UNITS, group, padded_head(shape)),
        )


def padded_group(shape: TaskShape) -> int:
    """Query heads of a KV head, as a power of two of at least 16, which matrix units take."""
    return max(16, 1 << (shape.query_heads // shape.kv_heads - 1).bit_length())


def padded_head(shape: TaskShape) -> int:
    return 1 << (shape.head_size - 1).bit_length()


def most_parts(shape: TaskShape, part_tiles: int) -> int:
    """Of the longest context that a step may have."""
    tiles = -(-shape.max_blocks * shape.block_size // CONTEXT_TILE)
    return min(MOST_PARTS, -(-tiles // part_tiles))


@kernel()
def refuse(closed: tl.tensor, state: tl.tensor) -> None:
    """Serve no task any more, the present one included."""
    tl.atomic_xchg(state + SPOILED, 1, sem="relaxed", scope="gpu")
    tl.store(closed, tl.full((), REFUSED, tl.int64))


@kernel()
def cache_at(address: tl.tensor, query: tl.tensor) -> tl.tensor:
    """A cache's pointer; the compiler is told of the alignment that it cannot see."""
    return tl.multiple_of(tl.load(address).to(query.dtype), ALIGNED)


ALIGNED = tl.constexpr(ALIGNED_BYTES)


@kernel()
def first_of_block(
    block: tl.tensor, abreast: tl.constexpr, block_stride: tl.tensor, abreast_stride: tl.tensor
) -> tl.tensor:
    """Where a block begins in a cache; so many lie beside one another before the next follow."""
    if abreast == 1:
        return block * block_stride
    else:
        return block // abreast * block_stride + block % abreast * abreast_stride


@kernel()
def publish(state: tl.tensor, done: tl.tensor, serving: tl.tensor, contexts: tl.tensor) -> None:
    """Count a context whose answer is stored; the last of ``contexts`` publishes the task."""
    tl.debug_barrier()
    before = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="sys")
    if before == contexts - 1:
        tl.store(state + ARRIVED, 0)
        tl.store(state + NUMBER, serving)
        if tl.atomic_add(state + SPOILED, 0, sem="relaxed", scope="gpu") == 0:
            tl.store(done + PICKED_UP_AT, tl.load(state + PICKED_UP))
            tl.store(done + FINISHED_AT, now_ns())
            tl.debug_barrier()
            tl.atomic_xchg(done + NUMBER, serving, sem="release", scope="sys")


@kernel()
def parts_of(rows: tl.tensor, kv_heads: tl.constexpr, most_parts: tl.constexpr) -> tl.tensor:
    """Into how many parts each context of a task with ``rows`` rows may be divided."""
    contexts = (rows * kv_heads).to(tl.int32)
    return tl.maximum(1, tl.minimum(most_parts, tl.full((), UNITS, tl.int32) // contexts))


UNITS = tl.constexpr(MOST_UNITS)


@kernel()
def merged_parts(
    first: tl.tensor,
    count: tl.tensor,
    sums: tl.tensor,
    gathered: tl.tensor,
    padded_group: tl.constexpr,
    padded_head: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest logit, the sum of weights and the weighted values of ``count`` parts."""
    heads = tl.arange(0, padded_group)
    inner = heads[:, None] * padded_head + tl.arange(0, padded_head)[None, :]
    largest = tl.full((padded_group,), float("-inf"), tl.float32)
    total = tl.zeros((padded_group,), tl.float32)
    answer = tl.zeros((padded_group, padded_head), tl.float32)
    for part in range(first, first + count):
        at_sums = sums + part * 2 * padded_group + heads
        at_gathered = gathered + part * padded_group * padded_head
        # Of other multiprocessors, so not what this one's cache may have of them.
        theirs_largest = tl.load(at_sums, cache_modifier=".cg")
        theirs_total = tl.load(at_sums + padded_group, cache_modifier=".cg")
        theirs_answer = tl.load(at_gathered + inner, cache_modifier=".cg")
        higher = tl.maximum(largest, theirs_largest)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(largest - base)
        weight = tl.exp(theirs_largest - base)
        total = total * shrink + theirs_total * weight
        answer = answer * shrink[:, None] + theirs_answer * weight[:, None]
        largest = higher
    return largest, total, answer


@kernel()
def attend_units(
    first: tl.tensor,
    programs: tl.tensor,
    serving: tl.tensor,
    query: tl.tensor,
    requests: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    caches: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    ended: tl.tensor,
    sums: tl.tensor,
    gathered: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    block_stride: tl.tensor,
    abreast_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    abreast: tl.constexpr,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    part_tiles: tl.constexpr,
    most_parts: tl.constexpr,
) -> None:
    """Compute what program ``first`` of ``programs`` has of task ``serving``.

    A unit is a part of the context of a row and KV head. Who ends the last part of a context
    stores its answer, and the last of all publishes.
    """
    rows = tl.load(state + ROWS, volatile=True)
    parts = parts_of(rows, kv_heads, most_parts)
    for unit in range(first, rows.to(tl.int32) * kv_heads * parts, programs):
        at = unit // parts
        part = unit % parts
        row = at // kv_heads
        head = at % kv_heads
        request = tl.load(requests + row)
        context = tl.load(contexts + row)
        limit = tl.load(state + LIMIT, volatile=True)
        known = (request >= 0) & (request < max_requests)
        known = known & (context >= 1) & (context <= max_blocks * block_size)
        # A row that is refused has no context, so that nothing of it is read.
        context = tl.where(known, context, 0)
        request = tl.where(known, request, 0)
        tiles = (context + tile - 1) // tile
        used = tl.maximum(1, tl.minimum(parts, (tiles + part_tiles - 1) // part_tiles))
        if part < used:
            each = (tiles + used - 1) // used * tile
            end = tl.minimum(context, (part + 1) * each)

            cache = caches + 2 * tl.load(state + LAYER)
            key_cache = cache_at(cache, query)
            value_cache = cache_at(cache + 1, query)
            places = tl.arange(0, padded_head)
            heads = tl.arange(0, padded_group)
            inside_head = places < head_size
            inside_group = heads < group
            at_query = (at * group + heads[:, None]) * head_size + places[None, :]
            own = inside_group[:, None] & inside_head[None, :]
            queries = tl.load(query + at_query, mask=own, other=0.0)

            largest = tl.full((padded_group,), float("-inf"), tl.float32)
            total = tl.zeros((padded_group,), tl.float32)
            answer = tl.zeros((padded_group, padded_head), tl.float32)
            strange = tl.zeros((tile,), tl.int32)
            for begin in range(part * each, end, tile):
                tokens = begin + tl.arange(0, tile)
                inside = tokens < end
                table = block_table + request.to(tl.int64) * max_blocks + tokens // block_size
                block = tl.load(table, mask=inside, other=0)
                theirs = inside & (block >= 0) & (block < limit)
                strange += (inside & (theirs == 0)).to(tl.int32)
                from_block = (
                    first_of_block(block.to(tl.int64), abreast, block_stride, abreast_stride)
                    + tokens % block_size * token_stride
                )
                at_token = (
                    from_block[:, None] + tl.cast(head, tl.int64) * head_stride + places[None, :]
                )
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
                answer = answer * shrink[:, None] + tl.dot(
                    weights.to(values.dtype), values, input_precision="ieee"
                )
                largest = higher
            if (known == 0) | (tl.sum(strange) != 0):
                refuse(closed, state)

            last = used == 1
            if used > 1:
                at_sums = sums + unit * 2 * padded_group + heads
                at_gathered = gathered + unit * padded_group * padded_head
                inner = heads[:, None] * padded_head + places[None, :]
                tl.store(at_sums, largest)
                tl.store(at_sums + padded_group, total)
                tl.store(at_gathered + inner, answer)
                tl.debug_barrier()
                last = tl.atomic_add(ended + at, 1, sem="acq_rel", scope="gpu") == used - 1
                if last:
                    tl.store(ended + at, 0)
                    largest, total, answer = merged_parts(
                        at * parts, used, sums, gathered, padded_group, padded_head
                    )
            if last:
                whole = (answer / total[:, None]).to(output.dtype.element_ty)
                tl.store(output + at_query, whole, mask=own)
                tl.store(lse + at * group + heads, largest + tl.log(total), mask=inside_group)
                publish(state, done, serving, rows * kv_heads)


@kernel("max_requests", "max_blocks")
def attend_rows(
    query: tl.tensor,
    requests: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    caches: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    ended: tl.tensor,
    sums: tl.tensor,
    gathered: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    block_stride: tl.tensor,
    abreast_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    abreast: tl.constexpr,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head: tl.constexpr,
    block_size: tl.constexpr,
    context_tile: tl.constexpr,
    part_tiles: tl.constexpr,
    most_parts: tl.constexpr,
) -> None:
    """Compute the attention of a task, if there is one; any number of programs divides it.

    Args:
        query: [rows, kv_heads * group, head_size]; ``output``, too.
        caches: int64 [layers, 2], addresses of key and value caches, with the strides that follow,
            in numbers of the cache's type.
        ended: and ``sums`` and ``gathered``: of :class:`LenderMemory`.
        lse: float32 [rows, kv_heads * group].
        abreast: blocks that lie beside one another, ``abreast_stride`` apart.
        group: query heads of a KV head.

    A row that asks for what is not the borrower's closes the loan, and nothing is published.
    """
    serving = tl.load(state + SERVING)
    if serving != tl.load(state + NUMBER):
        attend_units(
            tl.program_id(0),
            tl.num_programs(0),
            serving,
            query,
            requests,
            contexts,
            block_table,
            caches,
            closed,
            state,
            ended,
            sums,
            gathered,
            done,
            output,
            lse,
            max_requests,
            max_blocks,
            block_stride,
            abreast_stride,
            head_stride,
            token_stride,
            abreast,
            scale,
            kv_heads,
            group,
            padded_group,
            head_size,
            padded_head,
            block_size,
            context_tile,
            part_tiles,
            most_parts,
        )
