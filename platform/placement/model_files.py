"""Reads a model's layers, and the numbers that it has of weights, from the headers of its files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from safetensors import safe_open

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Model
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog
from loomserve.platform.placement.policy.graph import ModelShape

_OF_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(embed_tokens|wte|word_embeddings)\.weight$")
_HEAD = re.compile(r"(lm_head|embed_out)\.weight$")

# Types of numbers by safetensors' names: those that an engine turns into its own, and the bytes of
# others, which stay. All else has one.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
# vLLM's names of the type of an engine whose numbers have four bytes; all others have two.
_WIDE = frozenset({"float32", "float"})


def read(folder: Path) -> ModelShape:
    """Read the shape of a model from the headers in its folder, which was checked. Raises
    ConfigError if no tensor's name is that of a layer, or the hidden size is not stated."""
    sizes = {name: size for name, (size, _) in _tensors(folder).items()}
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


def held_bytes(resolved: Path | str, model: Model, *, on_gpus: bool) -> int:
    """What an engine holds of the weights that were found; 0 of a hub id. Each floating-point
    number is as wide as the engine computes. On a CPU the output head is there a second time,
    packed for its kernels, as vLLM needs it in both forms."""
    if not isinstance(resolved, Path):
        return 0
    wide = model.engine.get("dtype", "auto" if on_gpus else cpu_dtype()) in _WIDE
    held = {name: _held(size, kind, wide) for name, (size, kind) in _tensors(resolved).items()}
    if on_gpus:
        return sum(held.values())
    head = sum(size for name, size in held.items() if _HEAD.search(name))
    # Without one of its own the embeddings are the head.
    head = head or sum(size for name, size in held.items() if _EMBEDDINGS.search(name))
    return sum(held.values()) + head


def _held(size: int, kind: str, wide: bool) -> int:
    """Bytes of a tensor in an engine, of so many numbers of a type."""
    if kind not in _FLOATS:
        return size * _OTHERS.get(kind, 1)
    return size * (4 if wide else 2)


def _tensors(folder: Path) -> dict[str, tuple[int, str]]:
    """Each tensor's numbers, and safetensors' name of their type."""
    found: dict[str, tuple[int, str]] = {}
    for path in catalog.weight_files(folder):
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                of = tensors.get_slice(name)
                found[name] = math.prod(of.get_shape()), of.get_dtype()
    return found
