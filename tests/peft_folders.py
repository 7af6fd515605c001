"""PEFT adapters with seeded random weights, as PEFT saves them, of a model's shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from loomserve.platform.adapters.peft import base_shapes

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path | Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    rank: int = 8,
    alpha: float = 16,
    scale: float = 0.05,
    targets: Sequence[str] = TARGETS,
    **config: Any,
) -> Path:
    """Write an adapter of all ``targets`` of a model; returns its folder.

    Args:
        folder: is made, or written over.
        base: the model's folder, or the shapes of its tensors.
        seed: of its weights.
        rank: of each module.
        alpha: PEFT's lora_alpha.
        scale: of the weights; large enough that answers are others.
        targets: last parts of modules' names.
        config: further fields of PEFT's configuration.
    """
    shapes = base_shapes(base) if isinstance(base, Path) else base
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets:
            continue
        for side, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = (
                random.standard_normal(size) * scale
            ).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
