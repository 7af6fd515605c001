"""A mini model of Llama-3-8B's shape with random weights, which decodes one step over and over.

No rotary embedding, no sampling, no vocabulary: what is left takes the time of a decoding step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu.step import DEVICE, HAS_GPU

# isort: split
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from loomserve.platform.lending.cuda.buffer import TaskShape

INNER = 14336 if HAS_GPU else 64

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Of a layer, query, key, value and the output to fill: [rows, heads, head_size]."""


class Layer(NamedTuple):
    """Weights as linear layers have them, [out, in]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class MiniModel:
    """Layers without their attention, which the caller computes."""

    def __init__(self, shape: TaskShape) -> None:
        self._shape = shape
        hidden = shape.query_width
        self._layers = [
            Layer(
                weight(hidden + 2 * shape.key_width, hidden, shape.dtype),
                weight(hidden, hidden, shape.dtype),
                weight(2 * INNER, hidden, shape.dtype),
                weight(hidden, INNER, shape.dtype),
            )
            for _ in range(shape.layers)
        ]

    def step(
        self, hidden: torch.Tensor, attend: Attend, poll: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Compute all layers of [rows, hidden]; ``poll`` is called before each product and
        attention, as a lender looks for tasks."""
        shape, width = self._shape, hidden.shape[1]
        for number, layer in enumerate(self._layers):
            poll()
            rows = rms_norm(hidden, (width,)) @ layer.qkv.T
            parts = rows.split((width, shape.key_width, shape.key_width), dim=1)
            query, key, value = (part.unflatten(1, (-1, shape.head_size)) for part in parts)
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            poll()
            attend(number, query, key, value, output)
            poll()
            hidden = hidden + output.flatten(1) @ layer.out.T
            poll()
            gate, up = (rms_norm(hidden, (width,)) @ layer.gate_up.T).chunk(2, dim=1)
            poll()
            hidden = hidden + (silu(gate) * up) @ layer.down.T
        return hidden


class OwnKv:
    """KV of rows that are computed at home: contiguous, the step's own token at the end."""

    def __init__(self, shape: TaskShape, rows: int) -> None:
        size = (shape.layers, rows, shape.kv_heads, shape.max_blocks * shape.block_size)
        self.key, self.value = (
            torch.randn((*size, shape.head_size), dtype=shape.dtype, device=DEVICE)
            for _ in range(2)
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self.key[layer, :, :, -1] = key
        self.value[layer, :, :, -1] = value
        answer = scaled_dot_product_attention(
            query[:, :, None], self.key[layer], self.value[layer], enable_gqa=True
        )
        output.copy_(answer[:, :, 0])


def weight(out: int, into: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((out, into), dtype=dtype, device=DEVICE) * into**-0.5
