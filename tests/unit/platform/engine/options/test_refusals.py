"""What users are told where vLLM's own words for why there is no engine say nothing to them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import ModelRegistry
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from loomserve.kvstore.engine import connector
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.engine.options import engine_config as configured
from loomserve.platform.engine.options.engine_config import (
    engine_config,
    explained,
    look_at_class,
    why_not_stored,
)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Odd", "Unknown"]}))
    return {"model": str(tmp_path)}


def known(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """Have vLLM know a class that raises an error where it is imported."""

    def load_model_cls() -> type[nn.Module]:
        if error is not None:
            raise error
        return nn.Linear

    monkeypatch.setitem(ModelRegistry.models, "Odd", SimpleNamespace(load_model_cls=load_model_cls))
    return nn.Linear


def test_a_package_that_a_models_class_imports_is_named(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(ModuleNotFoundError("No module named 'odd'", name="odd"), monkeypatch)
    with pytest.raises(ConfigError, match="Odd needs the Python package odd"):
        look_at_class(options)


def test_a_class_is_looked_at_without_another_process(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_model = known(None, monkeypatch)
    look_at_class(options)
    found = ModelRegistry.models["Odd"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert found.load_model_cls() is of_model
    assert not found.inspect_model_cls().is_hybrid


def test_what_cannot_be_looked_at_is_vllms_to_refuse(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(RuntimeError("odd"), monkeypatch)
    before = ModelRegistry.models["Odd"]
    look_at_class(options)
    look_at_class({"model": "org/model"})
    assert ModelRegistry.models["Odd"] is before


def test_a_state_that_is_computed_in_bfloat16_only_says_what_to_set() -> None:
    error = NotImplementedError("\"causal_conv1d_fwd_kernel_impl\" not implemented for 'Float'")
    told = explained(error)
    assert isinstance(told, ConfigError)
    assert "set engine.dtype to bfloat16" in str(told)
    for other in (NotImplementedError("sinks"), ValueError("causal_conv1d")):
        assert explained(other) is other


def model(kind: str = "decoder", **given: Any) -> Any:
    text = SimpleNamespace(layer_types=given.get("layers"))
    return SimpleNamespace(
        attn_type=kind,
        use_mla=given.get("latent", False),
        hf_text_config=text,
        get_sliding_window=lambda: given.get("window"),
    )


MIXED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "on_cpu", "why"),
    [
        (model(), True, None),
        (model("hybrid"), True, "state beside"),
        (model("attention_free"), True, "state instead"),
        (model("encoder_decoder"), False, "an encoder"),
        (model("encoder_only"), False, "all of its input"),
        (model(latent=True), True, "latent"),
        (model(latent=True), False, None),
        (model(window=64), True, "window"),
        (model(window=64, layers=MIXED[:1] * 2), False, "window"),
        (model(window=64, layers=MIXED), True, None),
    ],
)
def test_blocks_are_stored_where_they_may_be_computed_with_again(
    config: Any, on_cpu: bool, why: str | None
) -> None:
    told = why_not_stored(config, on_cpu=on_cpu)
    assert told == why or (why is not None and told is not None and why in told)


@pytest.mark.parametrize(("kind", "kept"), [("decoder", True), ("hybrid", False)])
def test_an_engine_of_another_model_has_no_store(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def args(**given: Any) -> Any:
        cached = given.get("enable_prefix_caching", True) and kind == "hybrid"
        caches = SimpleNamespace(mamba_cache_mode="align" if cached else "none")
        config = SimpleNamespace(model_config=model(kind), cache_config=caches, **given)
        return SimpleNamespace(create_engine_config=lambda: config)

    monkeypatch.setattr(configured, "AsyncEngineArgs", args)
    monkeypatch.setattr(configured, "structured", dict)
    made: Any = engine_config({"model": "m", "kv_transfer_config": "a store"})
    assert (made.kv_transfer_config, made.model) == ("a store" if kept else None, "m")
    assert made.cache_config.mamba_cache_mode == "none", "a CPU's kernels keep no state of a block"


def test_the_store_refuses_what_drops_blocks() -> None:
    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}

    def groups(*specs: Any) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])

    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    assert connector._only_kind(groups(full)) is full
    with pytest.raises(ValueError, match="several kinds"):
        connector._only_kind(groups(full, window))
    with pytest.raises(ValueError, match="drops blocks"):
        connector._only_kind(groups(window))
