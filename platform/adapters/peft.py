"""Checks that a folder is a PEFT adapter that vLLM computes whole, and that it is of its model.

vLLM copies a tensor that is too small into the corner of one that is not, passes over layers that
the model does not have, and knows nothing of ranks that differ by layer: an adapter of another
model would answer, and wrongly. So what it does not compute is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.models.catalog import weight_files

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# Of each module: how a tensor's name ends, and which side of the module it is.
_SIDES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}
# Fields of PEFT's configuration that vLLM passes over or refuses, and the value that they may have.
_PLAIN: dict[str, tuple[object, str]] = {
    "use_dora": (False, "DoRA is not computed"),
    "bias": ("none", "an adapter's biases are not computed"),
    "lora_bias": (False, "an adapter's biases are not computed"),
    "modules_to_save": (None, "whole modules of an adapter are not computed"),
    "trainable_token_indices": (None, "an adapter's own tokens are not computed"),
    "rank_pattern": (None, "ranks that differ by layer are not computed"),
    "alpha_pattern": (None, "scales that differ by layer are not computed"),
    "use_qalora": (False, "QA-LoRA is not computed"),
    "alora_invocation_tokens": (None, "activated LoRA is not computed"),
}

Shape = tuple[int, ...]


@dataclass
class _Module:
    sides: dict[str, Shape] = field(default_factory=dict)
    embeds: bool = False


def check_adapter(folder: Path, max_rank: int, base: Mapping[str, Shape] | None) -> int:
    """Check an adapter, reading no more than headers of its tensors; returns its rank.

    Args:
        folder: The folder of its two files.
        max_rank: The largest that its model takes.
        base: Shapes of the model's tensors; None: they are not known here.

    Raises ConfigError, which names the file and the field, if a file is missing or damaged, vLLM
    does not compute it, its rank is too large, or it is of another model.
    """
    rank = _check_config(folder / CONFIG_FILE, max_rank)
    modules = _modules(folder / WEIGHTS_FILE)
    for name, module in modules.items():
        _check_module(folder / WEIGHTS_FILE, name, module, rank, base)
    return rank


def base_shapes(folder: Path) -> dict[str, Shape]:
    """Shapes of a model's tensors by name; raises ``ConfigError`` if the folder is damaged."""
    shapes: dict[str, Shape] = {}
    for path in weight_files(folder):
        shapes |= _shapes(path)
    return shapes


def _check_config(path: Path, max_rank: int) -> int:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: give a PEFT adapter's folder, or save the adapter again"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): save the adapter again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold one JSON object: save the adapter again")
    _check_fields(path, config)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"{path}: r must be the adapter's rank, and is {rank!r}")
    if not isinstance(config.get("lora_alpha"), int | float) or not config.get("target_modules"):
        raise ConfigError(f"{path}: lora_alpha or target_modules is missing: save it again")
    if rank > max_rank:
        raise ConfigError(
            f"{path}: r is {rank}, and the model takes adapters of rank {max_rank} at most: raise "
            "its adapters.max_lora_rank, or train a smaller one"
        )
    return rank


def _check_fields(path: Path, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"{path}: peft_type is {kind!r}, and only LORA is computed")
    for name, (plain, why) in _PLAIN.items():
        given = config.get(name) or None
        if given is not None and given != plain:
            raise ConfigError(f"{path}: {name} is {given!r}, and {why}: train it without")


def _modules(path: Path) -> dict[str, _Module]:
    if not path.is_file():
        others = ", ".join(sorted(each.name for each in path.parent.glob("adapter_model.*")))
        raise ConfigError(
            f"{path} is missing"
            + (f" ({others} is not read: save it as safetensors)" if others else "")
            + ": give a PEFT adapter's folder, or save the adapter again"
        )
    modules: dict[str, _Module] = {}
    for name, shape in _shapes(path).items():
        ending = next((each for each in _SIDES if name.endswith(each)), None)
        if ending is None or len(shape) != 2:
            raise ConfigError(f"{path}: tensor {name!r} is none of a LoRA adapter that is computed")
        module = modules.setdefault(name.removeprefix(_PREFIX).removesuffix(ending), _Module())
        module.sides[_SIDES[ending]] = shape
        module.embeds |= "embedding" in ending
    if not modules:
        raise ConfigError(f"{path} has no tensors: save the adapter again")
    return modules


def _shapes(path: Path) -> dict[str, Shape]:
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {
                name: tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118 - it is no dict
            }
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error}): copy it again") from None


def _check_module(
    path: Path, name: str, module: _Module, rank: int, base: Mapping[str, Shape] | None
) -> None:
    if module.sides.keys() != {"A", "B"}:
        missing = "B" if "A" in module.sides else "A"
        raise ConfigError(f"{path}: lora_{missing} of {name!r} is missing: save it again")
    (rank_a, wide), (tall, rank_b) = module.sides["A"], module.sides["B"]
    if (rank_a, rank_b) != (rank, rank):
        raise ConfigError(
            f"{path}: {name!r} has rank {rank_a} and {rank_b}, and {CONFIG_FILE} says r: {rank}"
        )
    if base is None:
        return
    shape = _base_shape(path, name, base)
    own = (wide, tall) if module.embeds else (tall, wide)
    if shape is not None and shape != own:
        raise ConfigError(
            f"{path}: {name!r} is for a module of {_size(own)}, and the model's has "
            f"{_size(shape)}: it is an adapter of another model"
        )


def _base_shape(path: Path, name: str, base: Mapping[str, Shape]) -> Shape | None:
    """Shape of the module's weight in the model; None: it is kept in another form."""
    if (shape := base.get(f"{name}.weight")) is not None:
        return shape
    # Quantised weights have other names and shapes. What the model has nowhere under such a name
    # vLLM knows by its own: it refuses what it does not know.
    leaf = f".{name.rpartition('.')[2]}.weight"
    if any(other.startswith(f"{name}.") for other in base) or not any(
        other.endswith(leaf) for other in base
    ):
        return None
    raise ConfigError(f"{path}: the model has no {name!r}: it is an adapter of another model")


def _size(shape: Shape) -> str:
    return " x ".join(map(str, shape))
