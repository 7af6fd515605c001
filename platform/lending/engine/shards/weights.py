"""Weights of decoder layers: read from the model's files, freed, and read again."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from loomserve.platform.base.heap import give_back_freed

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def weights_of(
    model: nn.Module, layers: Container[int], config: VllmConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of these layers from the model's files, by their names there."""
    quiet: Any = replace(config.load_config, use_tqdm_on_load=False)
    for name, weight in DefaultModelLoader(quiet).get_all_weights(config.model_config, model):
        found = _LAYER.search(name)
        if found and int(found[1]) in layers:
            yield name, weight


class LayerWeights:
    """The weights of a loaded model, layer by layer. A released layer must not be computed.
    ``layers`` are its decoder layers as they are now; stand-ins may take their places later."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, config: VllmConfig) -> None:
        self._model = model
        self._in_use = layers
        self._layers = list(layers)
        self._config = config
        self._shapes: dict[int, list[tuple[nn.Parameter, torch.Size]]] = {}

    @property
    def released(self) -> Collection[int]:
        return self._shapes.keys()

    def size(self, layer: int) -> int:
        return sum(
            each.numel() * each.itemsize
            for module in self._large(layer)
            for each in _matrices_of(module)
        )

    def release(self, layer: int) -> None:
        """Free the memory of the layer's matrices, packed or not."""
        shapes = self._shapes[layer] = []
        for module in self._large(layer):
            # vLLM packs a matrix into memory that only this function has.
            module.__dict__.pop("cpu_linear", None)
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    shapes.append((parameter, parameter.shape))
                    parameter.data = parameter.data.new_empty(0)

    def restore(self, layer: int) -> None:
        """Read the layer's matrices again, as when the model was loaded."""
        large = self._large(layer)
        for parameter, shape in self._shapes.pop(layer):
            parameter.data = parameter.data.new_empty(shape)
        for module in large:
            initialize_layerwise_reload(module)
        # The model finds its layers by their places.
        in_use, self._in_use[layer] = self._in_use[layer], self._layers[layer]
        self._model.load_weights(weights_of(self._model, [layer], self._config))
        self._in_use[layer] = in_use
        for module in large:
            finalize_layerwise_reload(module, self._config.model_config)
        give_back_freed()

    def _large(self, layer: int) -> list[nn.Module]:
        """Return the layer's modules that have matrices; vectors, as of norms, are not worth it."""
        return [module for module in self._layers[layer].modules() if _matrices_of(module)]


def _matrices_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the matrices with their shapes at loading, without their memory."""
    every = get_layerwise_info(module).restore_metadata[0].values()
    return [each for each in every if each.ndim > 1]
