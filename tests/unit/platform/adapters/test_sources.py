"""Adapters are found, checked and kept under what is in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loomserve.platform.adapters.sources import check_configured, kept_folder, take, take_configured
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Model
from tests.peft_folders import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and an adapter of it."""
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    model = tmp_path / "base" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "tokenizer.json").write_text("{}")
    tensors = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, model / "model.safetensors")
    write_adapter(model.parent / "sql", SHAPES, seed=1, rank=4)
    return model.parent


def model(*sources: str, **changes: object) -> Model:
    load = [{"name": f"a{n}", "source": source} for n, source in enumerate(sources)]
    adapters = {"max_lora_rank": 8, "load": load, **changes}
    return Model(name="m", source="model", devices=("core0",), adapters=adapters)


def test_the_copy_is_known_by_its_weights_and_outlives_its_folder(base: Path) -> None:
    first = take(model(), "sql", base)
    assert (first.rank, first.folder) == (4, kept_folder(first.digest))
    # By any name and place.
    shutil.copytree(base / "sql", base / "same")
    assert take(model(), "same", base) == first
    assert take(model(), str(base / "same"), base) == first
    write_adapter(base / "sql", SHAPES, seed=2, rank=4)
    second = take(model(), "sql", base)
    assert second.digest != first.digest
    shutil.rmtree(base / "sql")
    assert {path.name for path in first.folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not list(kept_folder("x").parent.glob(".new-*"))


def test_a_scale_alone_makes_another_adapter(base: Path) -> None:
    first = take(model(), "sql", base)
    write_adapter(base / "sql", SHAPES, seed=1, rank=4, alpha=32)
    assert take(model(), "sql", base).digest != first.digest


@pytest.mark.parametrize("source", ["gone", "./gone", "gone/sql/x"])
def test_a_source_that_is_not_there_is_named(base: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=source):
        take(model(), source, base)


def test_errors_of_the_configuration_name_the_model_and_the_field(base: Path) -> None:
    write_adapter(base / "large", SHAPES, seed=1, rank=16)
    wrong = model("sql", "large")
    for check in (check_configured, take_configured):
        with pytest.raises(ConfigError) as error:
            check(wrong, base)
        assert "model 'm', adapters.load[1].source: " in str(error.value)
        assert "r is 16, and the model takes adapters of rank 8 at most" in str(error.value)
    (only,) = take_configured(model("sql"), base)
    assert only[0].name == "a0"
    check_configured(model("sql", "s3://bucket/fetched-when-it-is-loaded"), base)


def test_an_adapter_of_another_model_is_refused(base: Path) -> None:
    write_adapter(base / "other", {next(iter(SHAPES)): (4, 8)}, seed=1, rank=4)
    with pytest.raises(ConfigError, match="4 x 8, and the model's has 8 x 8"):
        take(model(), "other", base)
