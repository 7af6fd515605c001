"""Reads the number of a model's layers, and their parameters, from the headers of its files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from safetensors import safe_open

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.models import catalog
from loomserve.platform.placement.policy.model_shape import ModelShape

_OF_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(embed_tokens|wte|word_embeddings)\.weight$")
_HEAD = re.compile(r"(lm_head|embed_out)\.weight$")


def read(folder: Path) -> ModelShape:
    """Read the shape of a model from the headers in its folder, which was checked.

    Raises:
        ConfigError: no tensor's name is that of a layer, or the hidden size is not stated.
    """
    sizes = _tensor_sizes(folder)
    of_layers: dict[int, int] = {}
    for name, size in sizes.items():
        if match := _OF_LAYER.search(name):
            of_layers[int(match[1])] = of_layers.get(int(match[1]), 0) + size
    embeddings = sum(size for name, size in sizes.items() if _EMBEDDINGS.search(name))
    head = sum(size for name, size in sizes.items() if _HEAD.search(name))
    hidden = catalog.hidden_size(folder)
    if not of_layers or hidden is None:
        raise ConfigError(
            f"{folder}: cannot tell its layers apart, so they cannot be divided among devices: "
            "leave pipeline out"
        )
    return ModelShape(
        layers=len(of_layers),
        hidden_size=hidden,
        layer_parameters=sum(of_layers.values()) / len(of_layers),
        embedding_parameters=embeddings,
        head_parameters=head or embeddings,
    )


def _tensor_sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in catalog.weight_files(folder):
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                sizes[name] = math.prod(tensors.get_slice(name).get_shape())
    return sizes
