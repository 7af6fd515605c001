"""A lender's linear operators, which look for borrowers' tasks before they run, and between slices.

The operators that take long are linear: those of a prefill, which have many rows, and the output
projection of every step, which has a column for each word of the vocabulary. The first are sliced
along their rows as they run, into few slices, since few rows use a core's vector units less well.
The second is sliced along its columns beforehand, since weights are packed for a CPU's kernels and
cannot be sliced afterwards. Each slice runs vLLM's own kernel on its share of the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from loomserve.platform.lending.policy.slicing import Operator, SlicingPlan, split

Poll = Callable[[], Any]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

PREFILL_ROWS = 256
"""Rows of the prefill step for which operators are timed."""
_REPEATS = 5
_MOST_ROW_SLICES, _MOST_COLUMN_SLICES = 4, 16
_MOST_OVERHEAD = 0.03
"""Share of the lender's own step that slicing may cost."""


class SlicedOperators:
    """The linear operators of one loaded model of vLLM's, each whole or in slices."""

    def __init__(self, model: torch.nn.Module, poll: Poll) -> None:
        self._poll = poll
        self._layers: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "cpu_linear") and not _looks_up(module)
        }
        self._whole: dict[str, Linear] = {
            name: layer.cpu_linear for name, layer in self._layers.items()
        }
        self._prepared = self._whole
        self.plans: dict[str, SlicingPlan] = {}
        """The plans of ``decode`` and ``prefill`` steps; empty while nothing is sliced."""

    def use(self, prepared: bool) -> None:
        """Let steps run the operators as they were prepared last, or as vLLM made them."""
        for name, layer in self._layers.items():
            layer.cpu_linear = (self._prepared if prepared else self._whole)[name]

    def poll_never(self) -> None:
        self._prepared, self.plans = self._whole, {}

    def poll_only(self) -> None:
        self._prepared = {name: _polled(linear, self._poll) for name, linear in self._whole.items()}
        self.plans = {}

    def poll_in_slices(self, threshold_s: float) -> None:
        """Prepare slices as Weaver's algorithm plans them, on times measured now, so that the mean
        delay of a task is ``threshold_s`` at most, in seconds."""
        self.plans = {}
        for kind, rows in (("decode", 1), ("prefill", PREFILL_ROWS)):
            timed = list(self._timed(rows))
            most_s = _MOST_OVERHEAD * sum(operator.seconds for operator in timed)
            self.plans[kind] = split(timed, 0.0, 0.0, threshold_s, most_s)
        self._prepared = {}
        for name, layer in self._layers.items():
            linear = self._whole[name]
            if _is_head(layer):
                linear = _by_columns(layer, self.plans["decode"].slices[name], self._poll) or linear
            else:
                rows = PREFILL_ROWS // self.plans["prefill"].slices[name]
                linear = _by_rows(linear, rows, self._poll)
            self._prepared[name] = _polled(linear, self._poll)

    def _timed(self, rows: int) -> Iterator[Operator]:
        """Yield a step's operators; those of a kind, like ``qkv_proj``, are timed once."""
        timed: dict[str, Operator] = {}
        for name, layer in self._layers.items():
            kind = name.rpartition(".")[2]
            if kind not in timed:
                timed[kind] = _timed_whole_and_sliced(self._whole[name], layer, rows)
            yield replace(timed[kind], name=name)


def _polled(linear: Linear, poll: Poll) -> Linear:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        poll()
        return linear(x, weight, bias)

    return run


def _by_rows(linear: Linear, rows: int, poll: Poll) -> Linear:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= rows or x.dim() != 2:
            return linear(x, weight, bias)
        outputs = []
        for some in x.split(rows):
            poll()
            outputs.append(linear(some, weight, bias))
        return torch.cat(outputs)

    return run


def _by_columns(layer: Any, slices: int, poll: Poll) -> Linear | None:
    if slices == 1:
        return None
    linears = [_packed(weight) for weight in layer.weight.data.chunk(slices)]

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs, first = [], 0
        for width, linear in linears:
            poll()
            some = None if bias is None else bias[first : first + width]
            outputs.append(linear(x, weight, some))
            first += width
        return torch.cat(outputs, dim=-1)

    return run


def _packed(weight: torch.Tensor) -> tuple[int, Linear]:
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return weight.shape[0], layer.cpu_linear


def _is_head(layer: Any) -> bool:
    """Return whether it is the output projection, which computes only rows that are sampled."""
    return isinstance(layer, ParallelLMHead)


def _looks_up(layer: Any) -> bool:
    """Return whether it is an embedding, which vLLM packs as if rows were multiplied by it."""
    return isinstance(layer, VocabParallelEmbedding) and not _is_head(layer)


def _timed_whole_and_sliced(linear: Linear, layer: Any, rows: int) -> Operator:
    if _is_head(layer):
        most, whole_s = _MOST_COLUMN_SLICES, _seconds(linear, layer, 1)
        slice_s = _seconds(_packed(layer.weight.data.chunk(most)[0])[1], layer, 1)
    else:
        most, whole_s = (_MOST_ROW_SLICES if rows > 1 else 1), _seconds(linear, layer, rows)
        slice_s = _seconds(linear, layer, rows // most)
    return Operator("", whole_s, most, max(0.0, slice_s - whole_s / most))


def _seconds(linear: Linear, layer: Any, rows: int) -> float:
    width = layer.embedding_dim if _is_head(layer) else layer.input_size_per_partition
    x = torch.zeros(rows, width, dtype=layer.params_dtype)
    taken = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        linear(x, layer.weight, None)
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[_REPEATS // 2]
