"""What engines hold of weights, by the headers of models' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loomserve.platform.config import Model
from loomserve.platform.placement import model_files
from loomserve.platform.placement.model_files import held_bytes

LAYERS = {f"model.layers.{layer}.mlp.up_proj.weight": (64, 32) for layer in range(3)}
TABLE = (1000, 32)
IN_LAYERS, IN_TABLE = 3 * 64 * 32, 1000 * 32


def folder(tmp_path: Path, dtype: torch.dtype = torch.bfloat16, **tables: Any) -> Path:
    shapes = LAYERS | {name.replace("__", "."): shape for name, shape in tables.items()}
    made = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    save_file(made, tmp_path / "model.safetensors")
    return tmp_path


def model(**engine: Any) -> Model:
    return Model(name="a", source="demo", devices=("d",), engine=engine)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("half", 2), ("auto", 2)]
)
def test_numbers_are_as_wide_as_the_engine_computes_and_the_head_is_there_twice(
    dtype: str, width: int, stored: torch.dtype, tmp_path: Path
) -> None:
    path = folder(tmp_path, stored, model__embed_tokens__weight=TABLE)
    assert held_bytes(path, model(dtype=dtype), on_gpus=False) == width * (IN_LAYERS + 2 * IN_TABLE)


def test_a_head_of_its_own_is_packed_and_embeddings_are_not(tmp_path: Path) -> None:
    path = folder(tmp_path, model__embed_tokens__weight=TABLE, lm_head__weight=TABLE)
    assert held_bytes(path, model(dtype="float32"), on_gpus=False) == 4 * (IN_LAYERS + 3 * IN_TABLE)


def test_a_cpu_s_own_type_counts_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path)
    for dtype, width in (("float32", 4), ("auto", 2)):
        monkeypatch.setattr(model_files, "cpu_dtype", lambda dtype=dtype: dtype)
        assert held_bytes(path, model(), on_gpus=False) == width * IN_LAYERS


def test_quantised_numbers_stay_as_they_are(tmp_path: Path) -> None:
    made = {"a": torch.zeros(10, dtype=torch.int8), "b": torch.zeros(10, dtype=torch.int32)}
    save_file({**made, "scale": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert held_bytes(tmp_path, model(dtype="float32"), on_gpus=False) == 10 + 40 + 12


def test_of_a_hub_id_nothing_is_known() -> None:
    assert held_bytes("org/name", model(), on_gpus=False) == 0


@pytest.mark.parametrize(
    ("engine", "width"), [({}, 2), ({"dtype": "auto"}, 2), ({"dtype": "float32"}, 4)]
)
def test_a_gpu_computes_in_two_bytes_and_packs_nothing(
    engine: dict[str, str], width: int, tmp_path: Path
) -> None:
    path = folder(tmp_path, torch.float32, lm_head__weight=TABLE)
    assert held_bytes(path, model(**engine), on_gpus=True) == width * (IN_LAYERS + IN_TABLE)
