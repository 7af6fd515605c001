"""A loan whose two ends are processes that share tensors; their kernels are interpreted."""

from __future__ import annotations

import uuid
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

from loomserve.platform.lending.cuda.attention import LenderMemory
from loomserve.platform.lending.cuda.buffer import NUMBER, TaskBuffer, TaskShape
from tests.unit.platform.lending.cuda import ends
from tests.unit.platform.lending.cuda.ends import Answer, Rows, Step

GRANTED, BLOCKS = 20, 24
SHAPE = TaskShape(
    layers=3,
    query_heads=6,
    kv_heads=2,
    head_size=32,
    block_size=16,
    dtype=torch.float32,
    scale=32**-0.5,
    max_rows=8,
    max_requests=4,
    max_blocks=8,
)


def process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn"))


class Processes:
    """The two ends' processes."""

    def __init__(self) -> None:
        self._borrower = process()
        self._lender = process()

    def at_borrower(self, function: Any, *arguments: Any) -> Future[Any]:
        return self._borrower.submit(function, *arguments)

    def at_lender(self, function: Any, *arguments: Any) -> Future[Any]:
        return self._lender.submit(function, *arguments)

    def lender_died(self) -> None:
        self._lender.shutdown()
        self._lender = process()

    def end(self) -> None:
        self._borrower.shutdown()
        self._lender.shutdown()


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()


class Loan:
    """One loan between the two processes, and what its memory holds."""

    def __init__(self, processes: Processes, shape: TaskShape, patience_s: float) -> None:
        self.name, self.shape, self.processes = uuid.uuid4().hex, shape, processes
        self.buffer = TaskBuffer(*map(shared, TaskBuffer.allocate(shape, "cpu", "cpu")))
        self.granted = shared(torch.tensor([GRANTED]))
        # As vLLM lays them on a GPU: a token's key and value side by side.
        size = (shape.layers, BLOCKS, shape.kv_heads, shape.block_size, 2 * shape.head_size)
        self.memory = shared(torch.randn(size).to(shape.dtype))
        width = shape.head_size
        self.caches = [(one[..., :width], one[..., width:]) for one in self.memory]
        processes.at_borrower(
            ends.open_borrower, self.name, shape, self.buffer, patience_s
        ).result()
        self.own = LenderMemory(*map(shared, LenderMemory.allocate(shape, "cpu")))
        processes.at_lender(ends.open_lender, *self.lenders).result()

    @property
    def lenders(self) -> tuple[Any, ...]:
        """What a process opens the lender's end with."""
        return self.name, self.shape, self.buffer, self.caches, self.granted, self.own

    @property
    def closed(self) -> int:
        return int(self.buffer.closed)

    @property
    def done(self) -> int:
        return int(self.buffer.done[NUMBER.value])

    def begin(self, step: Step) -> None:
        self.processes.at_borrower(ends.begin_step, self.name, step).result()

    def post(self, layer: int, rows: Rows) -> None:
        self.processes.at_borrower(ends.post, self.name, layer, rows).result()

    def waiting(self, rows: int) -> Future[Answer]:
        return self.processes.at_borrower(ends.wait, self.name, rows, self.shape)

    def lender(self, function: Any, *arguments: Any) -> Any:
        return self.processes.at_lender(function, self.name, *arguments).result()

    def whole(self, layer: int, query: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of the step's rows over what the caches hold now, by torch, in float32."""
        return torch.stack([
            attention(query[row], *self.context(layer, step, request, end), self.shape.scale)
            for row, (request, end) in enumerate(contexts(step))
        ])  # fmt: skip

    def context(
        self, layer: int, step: Step, request: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, tokens, head_size] of all tokens before ``end``."""
        blocks = step.block_table[request].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :end].float()
            for cache in self.caches[layer]
        )
        return key, value


def contexts(step: Step) -> list[tuple[int, int]]:
    """Request and length of the context of each row."""
    starts = step.query_start_loc.tolist()
    return [
        (request, int(step.seq_lens[request]) - (starts[request + 1] - 1 - row))
        for request in range(len(step.seq_lens))
        for row in range(starts[request], starts[request + 1])
    ]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Output [query_heads, head_size] of one row."""
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    logits = torch.einsum("hd,htd->ht", query.float(), key) * scale
    return torch.einsum("ht,htd->hd", logits.softmax(-1), value)


def step_of(lens: list[int], added: list[int]) -> Step:
    """Requests of so many tokens, of which so many are the step's, over blocks in no order."""
    table = torch.randperm(GRANTED)[: len(lens) * (GRANTED // len(lens))]
    table = table.view(len(lens), -1)[:, : SHAPE.max_blocks].to(torch.int32)
    starts = torch.tensor([0, *added]).cumsum(0).to(torch.int32)
    slots = [
        int(table[request, place // SHAPE.block_size]) * SHAPE.block_size + place % SHAPE.block_size
        for request, (tokens, rows) in enumerate(zip(lens, added, strict=True))
        for place in range(tokens - rows, tokens)
    ]
    return Step(starts, torch.tensor(lens, dtype=torch.int32), table, torch.tensor(slots))


def rows_of(step: Step, dtype: torch.dtype = torch.float32) -> Rows:
    """Views into one product, as a model's projection leaves them."""
    widths = (SHAPE.query_width, SHAPE.key_width, SHAPE.key_width)
    whole = torch.randn(len(step.slot_mapping), sum(widths)).to(dtype)
    parts = whole.split(widths, dim=1)
    return Rows(*(part.unflatten(1, (-1, SHAPE.head_size)) for part in parts))


TWO = ([40, 77], [1, 3])
"""A decoding request, and one with three rows of a prompt."""
