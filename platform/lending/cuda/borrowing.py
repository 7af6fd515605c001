"""The borrower's kernels: describe a step's rows, post those of a layer, wait for their attention,
fetch it.

The number of a task is counted on the device, and rows and patience are read there, so that a graph
may capture all of these and be replayed in each step.
"""

from __future__ import annotations

import torch
import triton.language as tl

from loomserve.platform.lending.cuda.buffer import (
    LAYER,
    NUMBER,
    POSTED_AT,
    ROWS,
    TIMED_OUT,
    TaskBuffer,
    TaskShape,
)
from loomserve.platform.lending.cuda.kernel import (
    LOOKS,
    Launch,
    compile_for,
    kernel,
    launch,
    now_ns,
    release,
    rest,
)
from loomserve.platform.lending.ring.words import LINE_WORDS

TILE = 1024
"""Numbers that a program copies at once."""
ROW_TILE = 256
"""Rows, or blocks, that a program describes at once."""

# Words of a borrower's own state, int64 in its memory. NUMBER is of the last task posted, ROWS of
# the step.
ARRIVED = tl.constexpr(3)
ANSWERED = tl.constexpr(4)
PATIENCE_NS = tl.constexpr(5)
TAKEN_AT = tl.constexpr(6)
HANDED_AT = tl.constexpr(7)


@kernel()
def copy_row(
    source: tl.tensor, target: tl.tensor, there: tl.tensor, width: tl.constexpr, tile: tl.constexpr
) -> None:
    """Copy a row, or zeros if it is not ``there``."""
    for first in range(0, width, tile):
        place = first + tl.arange(0, tile)
        inside = place < width
        numbers = tl.load(source + place, mask=inside & there, other=0.0)
        tl.store(target + place, numbers, mask=inside)


@kernel("query_start_loc", "seq_lens", "block_table", "slots", "rows", "width", "stride", "most")
def describe_rows(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    buffer: tl.tuple,
    state: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    most: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write what the step's rows are into the task buffer, a request a program. ``block_table`` is
    [requests, width], its rows ``stride`` apart, and ``most`` in the buffer. By a kernel, since the
    buffer is another GPU's, and for a copy torch would have both GPUs' streams wait."""
    request = tl.program_id(0)
    begin = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    length = tl.load(seq_lens + request)
    for first in range(begin, end, tile):
        row = first + tl.arange(0, tile)
        inside = row < end
        tl.store(buffer.requests + row, tl.full((tile,), 0, tl.int32) + request, mask=inside)
        tl.store(buffer.contexts + row, length - (end - 1 - row), mask=inside)
        tl.store(buffer.slots + row, tl.load(slots + row, mask=inside), mask=inside)
    for first in range(0, width, tile):
        place = first + tl.arange(0, tile)
        inside = place < width
        blocks = tl.load(block_table + request.to(tl.int64) * stride + place, mask=inside)
        tl.store(buffer.block_table + request * most + place, blocks, mask=inside)
    if request == 0:
        tl.store(state + ROWS, rows.to(tl.int64))


@kernel("layer")
def post_rows(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    buffer: tl.tuple,
    state: tl.tensor,
    layer: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    query_width: tl.constexpr,
    key_width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy a row a program into the task buffer; the last program publishes the task. ``query`` is
    [rows, query_width], its rows ``query_stride`` apart; ``key`` and ``value`` likewise. A closed
    loan gets no task, but its number, so that no wait takes an old answer for its own."""
    row = tl.program_id(0)
    rows = tl.load(state + ROWS)
    if row < rows:
        there = rows > 0
        to_query = buffer.query + row * query_width
        copy_row(query + row * query_stride, to_query, there, query_width, tile)
        copy_row(key + row * key_stride, buffer.key + row * key_width, there, key_width, tile)
        to_value = buffer.value + row * key_width
        copy_row(value + row * value_stride, to_value, there, key_width, tile)
        tl.debug_barrier()
        before = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="sys")
        if before == rows - 1:
            number = tl.load(state + NUMBER) + 1
            tl.store(state + ARRIVED, 0)
            tl.store(state + NUMBER, number)
            if tl.load(buffer.closed, volatile=True) == 0:
                posted = buffer.posted
                tl.store(posted + LAYER, layer.to(tl.int64))
                tl.store(posted + ROWS, rows)
                now = now_ns()
                tl.store(state + HANDED_AT, now)
                tl.store(posted + POSTED_AT, now)
                tl.debug_barrier()
                release(posted + NUMBER, number)


@kernel()
def wait_for_answer(done: tl.tensor, closed: tl.tensor, state: tl.tensor) -> None:
    """Spin, as one warp of one program, until the last task is done, or the loan closed, or
    patience at its end, which closes the loan. Leaves in ``state`` whether there is an answer. A
    grid that spins would hold multiprocessors which the lender may need, if both are on one GPU; so
    others copy."""
    number = tl.load(state + NUMBER)
    patience = tl.load(state + PATIENCE_NS)
    begin = now_ns()
    answered = tl.full((), 0, tl.int64)
    waiting = tl.full((), 1, tl.int32)
    looks = tl.full((), 0, tl.int64)
    while waiting != 0:
        looks += 1
        # Before the look for the result, or a halt of this kernel would pass for the lender's.
        now = now_ns()
        if tl.atomic_add(done + NUMBER, 0, sem="acquire", scope="sys") == number:
            answered = tl.full((), 1, tl.int64)
            waiting = tl.full((), 0, tl.int32)
        elif looks % LOOKS != 0:
            rest()
        elif tl.load(closed, volatile=True) != 0:
            waiting = tl.full((), 0, tl.int32)
        elif now - begin >= patience:
            tl.store(closed, tl.full((), TIMED_OUT, tl.int64))
            waiting = tl.full((), 0, tl.int32)
    tl.store(state + ANSWERED, answered)
    tl.store(state + TAKEN_AT, now_ns())


@kernel()
def fetch_rows(
    output: tl.tensor,
    from_output: tl.tensor,
    state: tl.tensor,
    output_stride: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy a row a program of the answer, or zeros if there is none. ``output`` is [rows, width],
    its rows ``output_stride`` apart."""
    row = tl.program_id(0)
    answered = tl.load(state + ANSWERED) != 0
    if row < tl.load(state + ROWS):
        to_output = output + row * output_stride
        copy_row(from_output + row * width, to_output, answered, width, tile)


class DeviceBorrower:
    """A borrower's end of one loan, for the stream that runs its model. Call :meth:`begin_step`
    once a step, then for each layer :meth:`post`, own work, and :meth:`wait`. All of it is queued
    on the current stream: nothing here waits for the device. Once the loan is closed, each answer
    is zeros, at once."""

    def __init__(self, shape: TaskShape, buffer: TaskBuffer, patience_s: float) -> None:
        self._shape = shape
        self._buffer = buffer
        self._rows = 0
        self._launch: Launch = launch
        device = buffer.output.device
        self.state = torch.zeros(LINE_WORDS, dtype=torch.int64, device=device)
        """On the device: ``ANSWERED`` tells whether the last wait had an answer."""
        self.state[PATIENCE_NS.value] = int(patience_s * 1e9)

    def compile(self, how: Launch = compile_for) -> None:
        """Compile what the methods below queue, which takes seconds at the first."""
        shape, device = self._shape, self._buffer.output.device
        query, key = (
            torch.empty((1, heads, shape.head_size), dtype=shape.dtype, device=device)
            for heads in (shape.query_heads, shape.kv_heads)
        )
        starts, lens, slots = (
            torch.empty(size, dtype=dtype, device=device)
            for size, dtype in ((2, torch.int32), (1, torch.int32), (1, torch.int64))
        )
        self._launch = how
        self.begin_step(starts, lens, lens[None], slots)
        self.post(0, query, key, key)
        self.wait(query)
        self._rows, self._launch = 0, launch

    def begin_step(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write what the rows of this step's tasks are, as in vLLM's attention metadata. All are on
        the device; their types are those of
        :meth:`loomserve.platform.lending.ring.borrower.Borrower.begin_step`. No task may be in
        flight. ``ValueError`` if the step is larger than the buffer, or empty."""
        shape, rows, requests = self._shape, len(slot_mapping), len(seq_lens)
        width = block_table.shape[1]
        if not (
            1 <= rows <= shape.max_rows
            and 1 <= requests <= shape.max_requests
            and width <= shape.max_blocks
        ):
            raise ValueError(
                f"a step of {rows} rows and {requests} requests of {width} blocks is not within "
                f"the buffer's {shape.max_rows}, {shape.max_requests} and {shape.max_blocks}"
            )
        self._launch(
            describe_rows,
            (requests,),
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
            self._buffer,
            self.state,
            rows,
            width,
            block_table.stride(0),
            shape.max_blocks,
            tile=ROW_TILE,
        )
        self._rows = rows

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hand the step's rows of one layer to the lender. ``query`` is [rows, query_heads,
        head_size] of the shape's dtype, ``key`` and ``value`` are [rows, kv_heads, head_size]; a
        row of each is contiguous. ``ValueError`` if the tensors are not of this step and shape."""
        shape = self._shape
        self._check(query, shape.query_heads)
        self._check(key, shape.kv_heads)
        self._check(value, shape.kv_heads)
        self._launch(
            post_rows,
            (self._rows,),
            query,
            key,
            value,
            self._buffer,
            self.state,
            layer,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            query_width=shape.query_width,
            key_width=shape.key_width,
            tile=TILE,
        )

    def wait(self, output: torch.Tensor) -> None:
        """Wait for the posted task, and copy its attention, or zeros, into ``output``, which is
        [rows, query_heads, head_size] with contiguous rows."""
        self._check(output, self._shape.query_heads)
        buffer = self._buffer
        self._launch(wait_for_answer, (1,), buffer.done, buffer.closed, self.state, num_warps=1)
        self._launch(
            fetch_rows,
            (self._rows,),
            output,
            buffer.output,
            self.state,
            output.stride(0),
            width=self._shape.query_width,
            tile=TILE,
        )

    def _check(self, tensor: torch.Tensor, heads: int) -> None:
        shape = (self._rows, heads, self._shape.head_size)
        if (
            tensor.shape != shape
            or tensor.stride()[1:] != (self._shape.head_size, 1)
            or tensor.dtype != self._shape.dtype
        ):
            raise ValueError(
                f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()} is not "
                f"a step's {self._shape.dtype} {shape} with contiguous rows"
            )
