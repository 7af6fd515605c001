"""Which folders are adapters of a model, and what the others are refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loomserve.platform.adapters.peft import base_shapes, check_adapter
from loomserve.platform.base.errors import ConfigError
from tests.peft_folders import write_adapter

LAYER = "model.layers.0.self_attn"
BASE = {
    "model.embed_tokens.weight": (96, 8),
    f"{LAYER}.q_proj.weight": (8, 8),
    f"{LAYER}.v_proj.weight": (4, 8),
    f"{LAYER}.o_proj.weight": (8, 8),
}
Q = f"base_model.model.{LAYER}.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sql", BASE, seed=1, rank=4)


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("base", [BASE, None])
def test_an_adapter_of_the_model_is_taken(folder: Path, base: Any) -> None:
    assert check_adapter(folder, 4, base) == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 8}, "r is 8, and the model takes adapters of rank 4 at most"),
        ({"r": "4"}, "r must be the adapter's rank"),
        ({"r": 0}, "r must be"),
        ({"r": 2}, "has rank 4 and 4, and adapter_config.json says r: 2"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"target_modules": None}, "target_modules is missing"),
    ],
)
def test_what_vllm_would_not_compute_is_refused_by_its_field(
    folder: Path, fields: dict[str, Any], words: str
) -> None:
    configure(folder, **fields)
    with pytest.raises(ConfigError) as error:
        check_adapter(folder, 4, BASE)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), f"lora_B of '{LAYER}.q_proj' is missing"),
        (lambda t: t.update({f"{Q}.bias": np.ones((2, 2))}), "q_proj.bias' is none of"),
        (lambda t: t.clear(), "has no tensors"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.ones((4, 6), np.float32)}),
            "is for a module of 8 x 6, and the model's has 8 x 8",
        ),
        (
            # vLLM would pass over layers that the model does not have.
            lambda t: t.update(
                {
                    name.replace("layers.0", "layers.7"): t.pop(name)
                    for name in list(t)
                    if "o_proj" in name
                }
            ),
            "the model has no 'model.layers.7.self_attn.o_proj'",
        ),
    ],
)
def test_tensors_that_are_not_of_the_model_are_refused(
    folder: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    change(folder, edit)
    with pytest.raises(ConfigError) as error:
        check_adapter(folder, 4, BASE)
    assert words in str(error.value)


def test_what_a_model_keeps_in_another_form_is_left_to_vllm(folder: Path) -> None:
    quantised = {name.replace(".weight", ".qweight"): (1, 1) for name in BASE}
    assert check_adapter(folder, 4, quantised) == 4


def test_embeddings_have_their_sides_the_other_way_round(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_"

    def embed(tensors: dict[str, Any]) -> None:
        tensors |= {
            f"{name}A": np.ones((4, 96), np.float32),
            f"{name}B": np.ones((8, 4), np.float32),
        }

    change(folder, embed)
    assert check_adapter(folder, 4, BASE) == 4
    with pytest.raises(ConfigError, match="embed_tokens"):
        check_adapter(folder, 4, BASE | {"model.embed_tokens.weight": (95, 8)})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_missing_or_cut_short_are_named(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=name):
        check_adapter(folder, 4, BASE)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        check_adapter(folder, 4, BASE)


def test_weights_that_are_no_safetensors_are_not_read(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin is not read"):
        check_adapter(folder, 4, BASE)


def test_a_models_shapes_are_read_of_all_its_files(tmp_path: Path) -> None:
    for number, name in enumerate(("a.weight", "b.weight")):
        tensors = {name: np.ones((number + 1, 3), np.float32)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    assert base_shapes(tmp_path) == {"a.weight": (1, 3), "b.weight": (2, 3)}
