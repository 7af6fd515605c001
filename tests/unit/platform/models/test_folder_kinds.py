"""Folders that are given as models and are something else: each is named, with what to do."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.models import catalog

WEIGHTS = save({"weight": np.ones((4, 4), np.float32)})
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
INDEX = json.dumps(
    {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
).encode()
MLX = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "quantization": {"group_size": 64, "bits": 4}}
).encode()
WHOLE = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}

Files = Mapping[str, bytes | None]


def made(folder: Path, files: Files) -> Path:
    """``None``: a link that leads nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.symlink_to("../../blobs/gone")
        else:
            path.write_bytes(content)
    return folder


def without(*names: str) -> dict[str, bytes]:
    return {name: content for name, content in WHOLE.items() if name not in names}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is empty"),
        ({**WHOLE, "model.safetensors": LFS}, r"git lfs pull"),
        ({**WHOLE, "tokenizer.json": LFS}, r"tokenizer.json only points to what Git LFS"),
        ({**without("model.safetensors"), "pytorch_model.bin": LFS}, r"git lfs pull"),
        ({**WHOLE, "config.json": b"<!DOCTYPE html>\n<html>"}, "web page in the place of config"),
        ({"tiny.Q4_K_M.gguf": b"GGUF"}, r"GGUF weights only \(tiny.Q4_K_M.gguf\)"),
        ({**without("model.safetensors"), "tiny.gguf": b"GGUF"}, "GGUF weights only"),
        (
            {
                "adapter_config.json": b'{"base_model_name_or_path": "org/base"}',
                "adapter_model.safetensors": WEIGHTS,
                "tokenizer.json": b"{}",
            },
            "is an adapter of org/base, and no model by itself.*adapters.load",
        ),
        (
            {"config.json": CONFIG, "adapter_config.json": b"{}", "adapter_model.bin": b""},
            "is an adapter, and no model",
        ),
        (
            {"refs/main": b"abc", "blobs/x": b"", "snapshots/abc/config.json": CONFIG},
            "is the hub's cache; give the folder of a snapshot in it, snapshots/abc",
        ),
        (
            {"models--org--name/refs/main": b"abc", "models--org--name/snapshots/abc/x": b""},
            "hub's cache of several models; write source: org/name",
        ),
        ({**WHOLE, "model.safetensors": None}, "leads nowhere"),
        ({**without("model.safetensors"), "pytorch_model.bin": b"x"}, "pickles.*pytorch_model.bin"),
        ({**without("model.safetensors"), "consolidated.00.pth": b"x"}, "pickles"),
        ({"params.json": b"{}", "consolidated.safetensors": WEIGHTS}, "maker's own format"),
        ({**without("model.safetensors"), "tf_model.h5": b"x"}, "TensorFlow's weights only"),
        ({**without("model.safetensors"), "flax_model.msgpack": b"x"}, "Flax's weights only"),
        ({**without("model.safetensors"), "model.onnx": b"x"}, "ONNX's weights only"),
        ({**without("model.safetensors"), "weights.npz": b"x"}, "MLX's weights only"),
        ({**WHOLE, "config.json": MLX}, "MLX has quantised"),
        (
            {**without("model.safetensors"), "model.safetensors.index.json": INDEX,
             "model-00001-of-00002.safetensors": WEIGHTS},
            r"model-00002-of-00002.safetensors is missing, 1 of 2 files",
        ),
        (
            {**without("model.safetensors"), "model-00002-of-00003.safetensors": WEIGHTS},
            r"are missing, 2 of 3 files by their numbers",
        ),
        ({**WHOLE, "model.safetensors": b""}, r"damaged or cut short \(0 bytes\)"),
        (
            {**without("model.safetensors"), "model.safetensors.incomplete": b"x"},
            "downloaded in part only",
        ),
        (
            {**without("model.safetensors"), ".cache/huggingface/download/a.incomplete": b"x"},
            "downloaded in part only",
        ),
        ({f"inner/{name}": content for name, content in WHOLE.items()}, "give inner"),
        (
            {f"{folder}/config.json": CONFIG for folder in ("a", "b")},
            "has 2 models in folders in it; give one, such as a, b",
        ),
        ({"model_index.json": b"{}", "unet/x.safetensors": WEIGHTS}, "pipeline of diffusers"),
        ({"modules.json": b"[]", "0_Transformer/config.json": CONFIG}, "give 0_Transformer"),
        (without("tokenizer.json"), "has no tokenizer"),
    ],
)  # fmt: skip
def test_a_folder_is_named_for_what_it_is(tmp_path: Path, files: Files, message: str) -> None:
    folder = made(tmp_path / "model", files)
    with pytest.raises(ConfigError, match=message) as raised:
        catalog.check_folder(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_hub_caches_folder_of_a_model_is_named_by_its_id(tmp_path: Path) -> None:
    folder = made(tmp_path / "models--org--tiny--chat", {"snapshots/abc/config.json": CONFIG})
    with pytest.raises(ConfigError, match="or write source: org/tiny--chat"):
        catalog.check_folder(folder)


def test_one_gguf_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    made(tmp_path, {"tiny.gguf": b"GGUF"})
    with pytest.raises(ConfigError, match="is one GGUF file"):
        catalog.check_folder(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "more",
    [
        {"pytorch_model.bin": b"x", "tf_model.h5": b"x", "onnx/model.onnx": b"x"},
        {"modules.json": b"[]", "1_Pooling/config.json": b"{}"},
        {"adapter_config.json": b"{}"},
        {".cache/huggingface/download/a.incomplete": b"x"},
        {"README.md": b"<!doctype html>"},
        {"quantized.gguf": b"GGUF"},
        {"training_args.bin": b"x"},
    ],
)
def test_what_else_lies_beside_a_whole_model_does_not_matter(tmp_path: Path, more: Files) -> None:
    catalog.check_folder(made(tmp_path, {**WHOLE, **more}))


def test_links_to_a_caches_blobs_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots/abc", made(tmp_path / "blobs", WHOLE)
    folder.mkdir(parents=True)
    for name in WHOLE:
        (folder / name).symlink_to(blobs / name)
    catalog.check_folder(folder)
