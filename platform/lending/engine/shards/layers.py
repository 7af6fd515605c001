"""Decoder layers of an engine that a lender keeps and computes.

The lender has the layers' weights, which it reads from the same files, and their KV. A step goes
there and back once: hidden states and residual in, hidden states and residual out (BanaServe,
section 4.3.1). The memory of the layers' weights and KV here becomes more blocks of the others.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.lending.engine.shards.shard import LocalKv, RemoteShard, room
from loomserve.platform.lending.engine.shards.weights import LayerWeights
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry

_PATIENT_ROWS = 32
"""Rows of one layer that may take as long as a layer's attention may."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's decoder layers; ``ValueError`` if they take or give more than positions,
    hidden states and residual."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if isinstance(layers, nn.ModuleList):
        taken = list(inspect.signature(layers[0].forward).parameters)
        if taken[:3] == ["positions", "hidden_states", "residual"]:
            return layers
    raise ValueError(
        f"layers of {type(model).__name__} cannot move: they take more than hidden states and "
        "residual; move attention heads instead"
    )


def check_layers(layers: range, geometry: Geometry, hidden_size: int) -> None:
    """Raise ``ValueError`` if the model has no such layers, or no others, or its hidden states do
    not fit through a ring."""
    if not 0 <= layers.start < layers.stop <= geometry.layers or len(layers) == geometry.layers:
        raise ValueError(
            f"layers {layers.start} to {layers.stop} cannot move: a model of {geometry.layers} has "
            f"0 to {geometry.layers}, and at least one must stay"
        )
    if hidden_size > geometry.query_heads * geometry.head_size:
        raise ValueError(
            "hidden states of this model are wider than its queries, for which alone a task has "
            "room; move attention heads instead"
        )


def room_without(layers: range, blocks: int, geometry: Geometry, weights: LayerWeights) -> int:
    """Return how many blocks fit into the memory of ``blocks`` once these layers have left."""
    freed = sum(map(weights.size, layers)) // geometry.layer_block_bytes
    return room(blocks, geometry.layers, len(layers), freed)


@dataclass(frozen=True)
class OwnModel:
    """The model that an engine's worker has loaded."""

    module: nn.Module
    config: VllmConfig

    @property
    def hidden_size(self) -> int:
        return int(self.config.model_config.get_hidden_size())

    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.module)

    def weights(self) -> LayerWeights:
        return LayerWeights(self.module, self.layers(), self.config)

    def description(self) -> dict[str, Any]:
        model = self.config.model_config
        options = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "block_size": self.config.cache_config.block_size,
        }
        return {"model": model.model, "options": options}


class RemoteLayers(RemoteShard):
    """Consecutive decoder layers, in whose place the model has stand-ins while they are away."""

    def __init__(
        self,
        kv: LocalKv,
        borrower: Borrower,
        patience_s: float,
        *,
        layers: range,
        modules: nn.ModuleList,
        weights: LayerWeights,
    ) -> None:
        blocks = room_without(layers, len(kv.caches[0]), kv.geometry, weights)
        super().__init__(kv, borrower, patience_s, blocks)
        self._modules = modules
        self._layers = layers
        self._weights = weights
        self._own = list(modules)
        self._kept = list(layers)

    def hand_over(self) -> None:
        for layer in self._layers:
            self._modules[layer] = _Nothing()
            self._use(layer, self._whole[layer].new_empty(0))
        first = self._layers.start
        row_s = self._patience_s * len(self._layers) / _PATIENT_ROWS
        self._modules[first] = _Elsewhere(self.borrower, self._patience_s, row_s)
        for layer in self.layers_here:
            self._use(layer, self._longer(layer))

    def free_memory(self) -> bool:
        if self._kept:
            layer = self._kept.pop()
            self._memory.release(self._whole[layer])
            self._weights.release(layer)
            return False
        give_back_freed()
        for layer in self.layers_here:
            self._memory.back(self._more(layer))
        return True

    def prepare_return(self) -> bool:
        """Read one layer's weights; once all are there, KV has the memory of the extra blocks."""
        if self._weights.released:
            self._weights.restore(max(self._weights.released))
        if self._weights.released:
            return False
        for layer in self.layers_here:
            self._memory.release(self._more(layer))
        for layer in self._layers:
            self._memory.back(self._whole[layer])
        return True

    def take_back(self) -> None:
        while not self.prepare_return():
            pass
        super().take_back()
        for layer in self._layers:
            self._modules[layer] = self._own[layer]

    @property
    def layers_here(self) -> frozenset[int]:
        return super().layers_here - frozenset(self._layers)

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        if layer in self._layers:
            return self._write_there(self._layers.index(layer), blocks, rows)
        self._kv_caches[layer][blocks.start : blocks.stop] = rows
        return True

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        if layer in self._layers:
            return self._read_there(self._layers.index(layer), blocks, rows)
        rows[:] = self._kv_caches[layer][blocks.start : blocks.stop]
        return True

    def _remote(self, number: int) -> torch.Tensor:
        return self._whole[self._layers[number]]


class _Elsewhere(nn.Module):  # type: ignore[misc]
    """Stands for the first layer that is away: has the lender compute all of them."""

    def __init__(self, borrower: Borrower, least_s: float, row_s: float) -> None:
        super().__init__()
        self._borrower = borrower
        self._least_s, self._row_s = least_s, row_s

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = torch.zeros_like(hidden_states)
        timeout_s = self._least_s + self._row_s * len(hidden_states)
        found = self._borrower.through_layers(hidden_states, residual, timeout_s)
        # The scheduler drops what comes of a lost step; it must only not be poison.
        return (hidden_states, residual) if found is None else found


class _Nothing(nn.Module):  # type: ignore[misc]
    """Stands for each other layer that is away."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, residual
