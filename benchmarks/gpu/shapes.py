"""The loans that steps measure: Llama-3-8B's attention, or something small to interpret."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.gpu.step import DEVICE, HAS_GPU

# Behind the step, which decides whether Triton interprets.
# isort: split
import torch

from loomserve.platform.lending.cuda.borrowing import DeviceBorrower
from loomserve.platform.lending.cuda.buffer import TaskBuffer, TaskShape
from loomserve.platform.lending.cuda.serving import DeviceLender

PATIENCE_S = 2.0


def llama(layers: int, rows: int, context: int) -> TaskShape:
    """Llama-3-8B's shape in bfloat16, or without a GPU a small one in float32."""
    heads = (32, 8, 128) if HAS_GPU else (4, 2, 32)
    return TaskShape(
        layers=layers,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_size=heads[2],
        block_size=16,
        # The interpreter multiplies the bits of bfloat16.
        dtype=torch.bfloat16 if HAS_GPU else torch.float32,
        scale=heads[2] ** -0.5,
        max_rows=rows,
        max_requests=rows,
        max_blocks=-(-context // 16),
    )


class Loan(NamedTuple):
    """Both ends in this process, random KV in blocks of no order, and a decoding step."""

    shape: TaskShape
    buffer: TaskBuffer
    borrower: DeviceBorrower
    lender: DeviceLender
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    block_table: torch.Tensor

    @classmethod
    def open(cls, shape: TaskShape, posted: torch.Tensor | None = None) -> Loan:
        """Make a loan whose every row is a request with as long a context as there may be.

        Args:
            posted: the line of words to use, in other memory than the GPU's.
        """
        rows, blocks = shape.max_rows, shape.max_rows * shape.max_blocks
        buffer = TaskBuffer.allocate(shape, DEVICE, DEVICE)
        if posted is not None:
            buffer = buffer._replace(posted=posted)
        size = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_size)
        memory = [torch.randn(size, dtype=shape.dtype, device=DEVICE) for _ in range(shape.layers)]
        caches = [(kv[..., : shape.head_size], kv[..., shape.head_size :]) for kv in memory]
        granted = torch.tensor([blocks], device=DEVICE)
        borrower = DeviceBorrower(shape, buffer, PATIENCE_S)
        lender = DeviceLender(shape, buffer, caches, granted)
        table = torch.randperm(blocks, device=DEVICE).view(rows, -1).to(torch.int32)
        context = shape.max_blocks * shape.block_size
        borrower.begin_step(
            torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
            table,
            table[:, -1].long() * shape.block_size + shape.block_size - 1,
        )
        return cls(shape, buffer, borrower, lender, caches, table)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value of the step."""
        shape = self.shape
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (
            torch.randn(shape.max_rows, n, shape.head_size, dtype=shape.dtype, device=DEVICE)
            for n in heads
        )
        return query, key, value

    def contiguous(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the rows attend to: [rows, kv_heads, context, head_size]."""
        key, value = (
            cache[self.block_table.long()].transpose(1, 2).flatten(2, 3)
            for cache in self.caches[layer]
        )
        return key, value
