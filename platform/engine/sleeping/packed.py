"""Packed copies of embeddings and output heads, which a CPU engine can make again.

For its kernels vLLM packs the weights of every linear operator, and frees what it packed. Those of
embeddings and output heads it keeps both ways: they are looked up by row, and tied to each other.
So their packed copies can go at any time, and be made of the same numbers when they are used next.
Those of embeddings beside a head are never used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class PackedOnUse:
    """The linear operator of a layer, whose packed weights exist from one use until a drop."""

    def __init__(self, layer: Any) -> None:
        """``layer`` has been packed by vLLM, and keeps its weights."""
        self._layer = layer
        self._linear: Linear | None = layer.cpu_linear

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._linear is None:
            self._linear = _packed(self._layer.weight)
        return self._linear(x, weight, bias)

    @property
    def nbytes(self) -> int:
        """What the packed weights take, which are about as large as what they were made of."""
        return 0 if self._linear is None else int(self._layer.weight.nbytes)

    def drop(self) -> None:
        """Free the packed weights."""
        self._linear = None


def pack_on_use(model: torch.nn.Module) -> list[PackedOnUse]:
    """Let what can be packed again be packed when it is used, and free what may never be.

    Args:
        model: vLLM's, whose weights are loaded.

    Returns:
        The operators that may be told to drop their copies between two steps.
    """
    found = []
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            operator = PackedOnUse(layer)
            if not isinstance(layer, ParallelLMHead):
                operator.drop()
            layer.cpu_linear = operator
            found.append(operator)
    return found


def _packed(weight: torch.Tensor) -> Linear:
    holder: Any = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight.data, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=False)
    linear: Linear = holder.cpu_linear
    return linear
