"""Some decoder layers of an engine, computed by a lender: its worker's part.

The lender has the layers' weights, read from the same files, and their KV. A step goes there and
back once: hidden states and residual in, hidden states and residual out (BanaServe, section 4.3.1).
What the layers' weights and KV took here becomes more blocks of the other layers'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from loomserve.platform.lending.engine.memory.freed import give_back
from loomserve.platform.lending.engine.shards.shard import RemoteShard, room
from loomserve.platform.lending.engine.shards.weights import LayerWeights
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry

_PATIENT_ROWS = 32
"""Of one layer, which may take as long as a layer's attention may."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's decoder layers.

    Raises:
        ValueError: its layers take or give more than positions, hidden states and residual.
    """
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
    """
    Raises:
        ValueError: these are none of the model's, or all, or do not fit through a ring.
    """
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
    """How many blocks there is room for where so many were, once these layers have left."""
    return room(blocks, *_shares_of(layers, geometry, weights))


def _shares_of(layers: range, geometry: Geometry, weights: LayerWeights) -> tuple[int, int, int]:
    freed = sum(map(weights.size, layers)) // geometry.layer_block_bytes
    return geometry.layers, len(layers), freed


class RemoteLayers(RemoteShard):
    """
    Args:
        modules: the model's decoder layers, of which some are replaced while they are away.
        layers: those that move.
        geometry: of all layers.
        weights: of the model.
        attention, kv_caches, release, numbers: as of any :class:`RemoteShard`.
        borrower: of the layers that move.
        patience_s: for one layer's attention.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        layers: range,
        geometry: Geometry,
        weights: LayerWeights,
        attention: Sequence[Any],
        kv_caches: list[torch.Tensor],
        release: Callable[[torch.Tensor], None],
        numbers: int,
        borrower: Borrower,
        patience_s: float,
    ) -> None:
        super().__init__(attention, kv_caches, release, numbers, borrower, patience_s)
        self._modules = modules
        self._layers = layers
        self._of_block = _shares_of(layers, geometry, weights)
        self._weights = weights
        self._own = list(modules)
        self._kept = list(layers)

    @property
    def _shares(self) -> tuple[int, int, int]:
        return self._of_block

    def leave(self) -> None:
        for layer in self._layers:
            self._modules[layer] = _Nothing()
            self._use(layer, self._whole[layer].new_empty(0))
        first = self._layers.start
        row_s = self._patience_s * len(self._layers) / _PATIENT_ROWS
        self._modules[first] = _Elsewhere(self.borrower, self._patience_s, row_s)
        for layer in self.layers_here:
            self._use(layer, self._longer(layer))

    def let_go(self) -> bool:
        if self._kept:
            layer = self._kept.pop()
            self._release(self._whole[layer])
            self._weights.release(layer)
            return False
        give_back()
        return True

    def prepare_home(self) -> bool:
        """Read one layer's weights, which take their memory twice until the blocks are gone."""
        if self._weights.released:
            self._weights.restore(max(self._weights.released))
        return not self._weights.released

    def come_home(self) -> None:
        while not self.prepare_home():
            pass
        super().come_home()
        for layer in self._layers:
            self._modules[layer] = self._own[layer]

    @property
    def layers_here(self) -> frozenset[int]:
        return super().layers_here - frozenset(self._layers)

    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        if layer in self._layers:
            return self._write_there(self._layers.index(layer), blocks, rows)
        self._here(layer)[blocks.start : blocks.stop] = rows
        return True

    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        if layer in self._layers:
            return self._read_there(self._layers.index(layer), blocks, rows)
        rows[:] = self._here(layer)[blocks.start : blocks.stop]
        return True

    def _moved(self, number: int) -> torch.Tensor:
        return self._by_part(self._whole[self._layers[number]])


class _Elsewhere(nn.Module):  # type: ignore[misc]
    """In place of the first layer that is away: all of them."""

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
    """In place of the other layers that are away."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, residual
