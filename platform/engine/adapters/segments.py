"""A step's adapters on a CPU: each computed for the rows of its own requests, and for no others.

vLLM's own operators for CPUs look each row's adapter up in a table, where a request without one has
index -1: torch takes that for the table's last, so in a batch with adapters the model itself would
answer as one of them. They also copy an adapter's weights for each token of a prompt. Here rows
that follow each other with one adapter are one product of matrices, and rows without are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import is_moe_model
from vllm.platforms import current_platform

Span = tuple[int, int, int]
"""Rows from the first up to but not the second have the adapter of the third, a place."""


def spans(places: Sequence[int]) -> list[Span]:
    """The spans of rows with an adapter; -1 is none."""
    found: list[Span] = []
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[start]:
            if places[start] >= 0:
                found.append((start, end, places[start]))
            start = end
    return found


class SegmentedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's operators of adapters on a CPU, by spans of rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: list[Span] = []
        self._sampled: list[Span] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take in which adapter each row of the next step has."""
        super().update_metadata(*args, **kwargs)
        self._tokens = spans(self.token_lora_indices.tolist())
        self._sampled = spans(self.sampler_indices.tolist())

    def _apply_shrink(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        _shrink(self._tokens, y.view(-1, y.shape[-1]), x, w_t_all, scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        _expand(self._tokens, y[:, y_offset : y_offset + y_slice_size], x, w_t_all, add_inputs)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        _expand(self._tokens, y, x, lora_b_stacked, add_inputs)

    def add_lora_linear(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._tokens:
            super().add_lora_linear(y, *args, **kwargs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._sampled:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        between = torch.zeros((x.size(0), lora_b_stacked.size(-1)), dtype=torch.float32)
        _shrink(self._sampled, between, x, lora_a_stacked, scale)
        _expand(self._sampled, y, between, lora_b_stacked, add_inputs=True)


def compute_by_segments() -> None:
    """Have vLLM take these operators for the model that is loaded next."""
    name = f"{SegmentedAdapters.__module__}.{SegmentedAdapters.__name__}"
    current_platform.get_punica_wrapper = lambda: name


def refuse_experts(model: torch.nn.Module) -> None:
    """Raises ``ValueError`` if vLLM has no CPU operators for this model's adapters."""
    if is_moe_model(model):
        raise ValueError(
            "vLLM computes no adapters of a mixture of experts on a CPU: leave the model's "
            "adapters out"
        )


def _shrink(
    of: Sequence[Span], y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, scale: float
) -> None:
    for start, end, place in of:
        weight = _of(weights, place).to(y.dtype)
        y[start:end, : weight.shape[0]] = scale * (x[start:end].to(y.dtype) @ weight.T)


def _expand(
    of: Sequence[Span], y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, add_inputs: bool
) -> None:
    for start, end, place in of:
        weight = _of(weights, place).to(y.dtype)
        # vLLM may pad one of them.
        columns = min(weight.shape[0], y.shape[1])
        made = x[start:end].to(y.dtype) @ weight[:columns].T
        if add_inputs:
            y[start:end, :columns] += made
        else:
            y[start:end, :columns] = made


def _of(weights: torch.Tensor, place: int) -> torch.Tensor:
    weight = weights[place]
    return weight.squeeze(0) if weight.dim() == 3 else weight
