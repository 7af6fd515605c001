"""The lender's attention: of a row and KV head, over its blocks, divided among programs.

Online softmax (Milakov and Gimelshein, 2018; as FlashAttention), for decoding: a unit of work is a
part of the context of one row and one KV head. Where a step has few rows, a context has several
parts, so that all multiprocessors have work; the program that ends the last of them merges all, by
their LSE (as Flash-Decoding does). Rows of a prefill are right and slow: each reads its context by
itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from loomserve.platform.lending.cuda.buffer import (
    FINISHED_AT,
    LAYER,
    NUMBER,
    PICKED_UP_AT,
    REFUSED,
    ROWS,
    TaskShape,
)
from loomserve.platform.lending.cuda.kernel import kernel, now_ns, release
from loomserve.platform.lending.ring.words import LINE_WORDS

ROW_TILE = 1024
"""Numbers of a row that a program writes at once."""
CONTEXT_TILE = 64
"""Tokens of a context whose logits a program computes at once."""
ATTENDING = {"num_warps": 2, "num_stages": 2}
"""How :func:`attend_rows` is compiled: of 21 such choices the best for an H200."""
PART_TILES = 4
"""The least tiles of a part, if there are more parts than one."""
MOST_PARTS = 16
"""The most parts of one context."""
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


class Strides(NamedTuple):
    """Strides of a lender's caches, in numbers of their type."""

    block: int
    abreast: int
    """From one of the blocks that lie beside one another to the next."""
    head: int
    token: int


class Fixed(NamedTuple):
    """What a lender's kernels are compiled for: its borrower's attention, and how it is divided."""

    abreast: int
    """Blocks that lie beside one another."""
    scale: float
    kv_heads: int
    group: int
    """Query heads of a KV head."""
    padded_group: int
    head_size: int
    padded_head: int
    width: int
    """Numbers of a row's keys."""
    block_size: int
    row_tile: int
    context_tile: int
    part_tiles: int
    most_parts: int

    @classmethod
    def of(cls, shape: TaskShape, abreast: int, part_tiles: int) -> Fixed:
        tiles = -(-shape.max_blocks * shape.block_size // CONTEXT_TILE)
        return cls(
            abreast=abreast,
            scale=shape.scale,
            kv_heads=shape.kv_heads,
            group=shape.query_heads // shape.kv_heads,
            padded_group=shape.padded_group,
            head_size=shape.head_size,
            padded_head=shape.padded_head,
            width=shape.key_width,
            block_size=shape.block_size,
            row_tile=ROW_TILE,
            context_tile=CONTEXT_TILE,
            part_tiles=part_tiles,
            most_parts=min(MOST_PARTS, -(-tiles // part_tiles)),
        )


class LenderMemory(NamedTuple):
    """What a lender's kernels keep between each other, on its own device; zeros at first."""

    state: torch.Tensor  # int64 [LINE_WORDS]
    ended: torch.Tensor  # int32 [MOST_UNITS], how many parts of each context are computed
    sums: torch.Tensor  # [MOST_UNITS, 2, padded_group], each part's largest logit and its weights
    gathered: torch.Tensor  # [MOST_UNITS, padded_group, padded_head], values by those weights

    @classmethod
    def allocate(cls, shape: TaskShape, device: torch.device | str) -> LenderMemory:
        group = shape.padded_group

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            zeros(LINE_WORDS, dtype=torch.int64),
            zeros(MOST_UNITS, dtype=torch.int32),
            zeros(MOST_UNITS, 2, group),
            zeros(MOST_UNITS, group, shape.padded_head),
        )


@kernel()
def refuse(closed: tl.tensor, state: tl.tensor) -> None:
    """Serve no task any more, the present one included."""
    tl.atomic_xchg(state + SPOILED, 1, sem="relaxed", scope="gpu")
    tl.store(closed, tl.full((), REFUSED, tl.int64))


@kernel()
def cache_at(address: tl.tensor, query: tl.tensor) -> tl.tensor:
    """A cache's pointer, with the alignment that the compiler cannot see."""
    return tl.multiple_of(tl.load(address).to(query.dtype), ALIGNED)


ALIGNED = tl.constexpr(ALIGNED_BYTES)


@kernel()
def first_of_block(block: tl.tensor, strides: tl.tuple, abreast: tl.constexpr) -> tl.tensor:
    """Return where a block begins in a cache, of which ``abreast`` lie beside one another."""
    if abreast == 1:
        return block * strides.block
    else:
        return block // abreast * strides.block + block % abreast * strides.abreast


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
            release(done + NUMBER, serving)


@kernel()
def parts_of(rows: tl.tensor, kv_heads: tl.constexpr, most_parts: tl.constexpr) -> tl.tensor:
    """Into how many parts each context of a task with ``rows`` rows may be divided."""
    contexts = (rows * kv_heads).to(tl.int32)
    return tl.maximum(1, tl.minimum(most_parts, tl.full((), UNITS, tl.int32) // contexts))


UNITS = tl.constexpr(MOST_UNITS)


@kernel()
def shrunk(largest: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the larger logit, the base of weights, and by what sums of weights so far shrink."""
    higher = tl.maximum(largest, other)
    # Nothing but -inf so far, if all blocks are strange.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, base, tl.exp(largest - base)


@kernel()
def merged_parts(
    first: tl.tensor, count: tl.tensor, memory: tl.tuple, fixed: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest logit, the sum of weights and the weighted values of ``count`` parts."""
    heads = tl.arange(0, fixed.padded_group)
    inner = heads[:, None] * fixed.padded_head + tl.arange(0, fixed.padded_head)[None, :]
    largest = tl.full((fixed.padded_group,), float("-inf"), tl.float32)
    total = tl.full((fixed.padded_group,), 0.0, tl.float32)
    answer = tl.full((fixed.padded_group, fixed.padded_head), 0.0, tl.float32)
    for part in range(first, first + count):
        at_sums = memory.sums + part * 2 * fixed.padded_group + heads
        at_gathered = memory.gathered + part * fixed.padded_group * fixed.padded_head
        # Of other multiprocessors, so not what this one's cache may have of them.
        theirs_largest = tl.load(at_sums, cache_modifier=".cg")
        theirs_total = tl.load(at_sums + fixed.padded_group, cache_modifier=".cg")
        theirs_answer = tl.load(at_gathered + inner, cache_modifier=".cg")
        largest, base, shrink = shrunk(largest, theirs_largest)
        weight = tl.exp(theirs_largest - base)
        total = total * shrink + theirs_total * weight
        answer = answer * shrink[:, None] + theirs_answer * weight[:, None]
    return largest, total, answer


@kernel()
def attend_units(
    first: tl.tensor,
    programs: tl.tensor,
    serving: tl.tensor,
    buffer: tl.tuple,
    memory: tl.tuple,
    caches: tl.tensor,
    strides: tl.tuple,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    fixed: tl.constexpr,
) -> None:
    """Compute what program ``first`` of ``programs`` has of task ``serving``. A unit is a part of
    the context of a row and KV head. Who ends the last part of a context stores its answer, and the
    last of all publishes."""
    state = memory.state
    rows = tl.load(state + ROWS, volatile=True)
    parts = parts_of(rows, fixed.kv_heads, fixed.most_parts)
    for unit in range(first, rows.to(tl.int32) * fixed.kv_heads * parts, programs):
        at = unit // parts
        part = unit % parts
        row = at // fixed.kv_heads
        head = at % fixed.kv_heads
        request = tl.load(buffer.requests + row)
        context = tl.load(buffer.contexts + row)
        limit = tl.load(state + LIMIT, volatile=True)
        known = (request >= 0) & (request < max_requests)
        known = known & (context >= 1) & (context <= max_blocks * fixed.block_size)
        # A row that is refused has no context, so that nothing of it is read.
        context = tl.where(known, context, 0)
        request = tl.where(known, request, 0)
        tiles = (context + fixed.context_tile - 1) // fixed.context_tile
        most = tl.minimum(parts, (tiles + fixed.part_tiles - 1) // fixed.part_tiles)
        used = tl.maximum(1, most)
        if part < used:
            each = (tiles + used - 1) // used * fixed.context_tile
            end = tl.minimum(context, (part + 1) * each)

            cache = caches + 2 * tl.load(state + LAYER)
            key_cache = cache_at(cache, buffer.query)
            value_cache = cache_at(cache + 1, buffer.query)
            places = tl.arange(0, fixed.padded_head)
            heads = tl.arange(0, fixed.padded_group)
            inside_head = places < fixed.head_size
            inside_group = heads < fixed.group
            at_query = (at * fixed.group + heads[:, None]) * fixed.head_size + places[None, :]
            own = inside_group[:, None] & inside_head[None, :]
            queries = tl.load(buffer.query + at_query, mask=own, other=0.0)

            largest = tl.full((fixed.padded_group,), float("-inf"), tl.float32)
            total = tl.full((fixed.padded_group,), 0.0, tl.float32)
            answer = tl.full((fixed.padded_group, fixed.padded_head), 0.0, tl.float32)
            strange = tl.full((fixed.context_tile,), 0, tl.int32)
            for begin in range(part * each, end, fixed.context_tile):
                tokens = begin + tl.arange(0, fixed.context_tile)
                inside = tokens < end
                of_request = buffer.block_table + request.to(tl.int64) * max_blocks
                block = tl.load(of_request + tokens // fixed.block_size, mask=inside, other=0)
                theirs = inside & (block >= 0) & (block < limit)
                strange += (inside & (theirs == 0)).to(tl.int32)
                from_block = (
                    first_of_block(block.to(tl.int64), strides, fixed.abreast)
                    + tokens % fixed.block_size * strides.token
                )
                at_token = (
                    from_block[:, None] + tl.cast(head, tl.int64) * strides.head + places[None, :]
                )
                there = theirs[:, None] & inside_head[None, :]
                keys = tl.load(key_cache + at_token, mask=there, other=0.0)
                values = tl.load(value_cache + at_token, mask=there, other=0.0)
                logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * fixed.scale
                logits = tl.where(theirs[None, :], logits, float("-inf"))
                largest, base, shrink = shrunk(largest, tl.max(logits, 1))
                weights = tl.exp(logits - base[:, None])
                total = total * shrink + tl.sum(weights, 1)
                answer = answer * shrink[:, None] + tl.dot(
                    weights.to(values.dtype), values, input_precision="ieee"
                )
            if (known == 0) | (tl.sum(strange) != 0):
                refuse(buffer.closed, state)

            last = used == 1
            if used > 1:
                at_sums = memory.sums + unit * 2 * fixed.padded_group + heads
                at_gathered = memory.gathered + unit * fixed.padded_group * fixed.padded_head
                inner = heads[:, None] * fixed.padded_head + places[None, :]
                tl.store(at_sums, largest)
                tl.store(at_sums + fixed.padded_group, total)
                tl.store(at_gathered + inner, answer)
                tl.debug_barrier()
                ended = tl.atomic_add(memory.ended + at, 1, sem="acq_rel", scope="gpu")
                last = ended == used - 1
                if last:
                    tl.store(memory.ended + at, 0)
                    largest, total, answer = merged_parts(at * parts, used, memory, fixed)
            if last:
                whole = (answer / total[:, None]).to(buffer.output.dtype.element_ty)
                tl.store(buffer.output + at_query, whole, mask=own)
                publish(state, buffer.done, serving, rows * fixed.kv_heads)


@kernel("max_requests", "max_blocks")
def attend_rows(
    buffer: tl.tuple,
    memory: tl.tuple,
    caches: tl.tensor,
    strides: tl.tuple,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    fixed: tl.constexpr,
) -> None:
    """Compute the attention of a task, if there is one; any number of programs divides it.
    ``caches`` is int64 [layers, 2], the addresses of key and value caches with these strides. A row
    that asks for what is not the borrower's closes the loan, and nothing is published."""
    serving = tl.load(memory.state + SERVING)
    if serving != tl.load(memory.state + NUMBER):
        attend_units(
            tl.program_id(0),
            tl.num_programs(0),
            serving,
            buffer,
            memory,
            caches,
            strides,
            max_requests,
            max_blocks,
            fixed,
        )
