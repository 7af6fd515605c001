"""Blocks whose bytes could differ never share a namespace; equal ones always do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.engine import fingerprint
from loomserve.kvstore.engine.fingerprint import folder_digest, namespace

INPUTS = {
    "weights": '{"model.safetensors": "00ff"}',
    "kv_dtype": "auto torch.bfloat16",
    "block": [16, 49152],
    "layout": "HND avx512 amx=True",
    "layers": 30,
    "parallel": [1, 1],
    "rank": 0,
    "lora": None,
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def model(folder: Path, weights: bytes = b"0123", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", '{"model.safetensors": "00fe"}'),
        ("kv_dtype", "fp8 torch.bfloat16"),
        ("kv_dtype", "auto torch.float16"),
        ("block", [32, 49152]),
        ("block", [16, 98304]),
        ("layout", "NHD avx512 amx=True"),
        ("layout", "HND avx2 amx=False"),
        ("layers", 31),
        ("parallel", [2, 1]),
        ("parallel", [1, 2]),
        ("rank", 1),
        ("lora", '{"adapter_model.safetensors": "11"}'),
    ],
)
def test_any_input_that_differs_makes_another_namespace(name: str, value: object) -> None:
    assert namespace(**{**INPUTS, name: value}) != namespace(**INPUTS)


@given(st.dictionaries(st.text(), values), st.dictionaries(st.text(), values))
def test_namespaces_are_equal_exactly_where_inputs_are(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert len(namespace(**one)) == 16
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (namespace(**one) == namespace(**other)) == same
    assert namespace(**dict(reversed(one.items()))) == namespace(**one)


def test_inputs_that_are_no_json_values_are_refused() -> None:
    with pytest.raises(TypeError):
        namespace(weights=object())


def test_another_process_makes_the_same_namespace_and_digest(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    code = (
        "import json, sys, pathlib\n"
        "from loomserve.kvstore.engine.fingerprint import folder_digest, namespace\n"
        "digest = folder_digest(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "print(namespace(**json.loads(sys.argv[3]), digest=digest).hex())"
    )
    arguments = [str(folder), str(tmp_path / "cache"), json.dumps(INPUTS)]
    there = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    digest = folder_digest(folder, tmp_path / "other cache")
    assert there.stdout.strip() == namespace(**INPUTS, digest=digest).hex()


def test_the_same_files_in_another_folder_have_the_same_digest(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert folder_digest(one, tmp_path / "c") == folder_digest(other, tmp_path / "c")


def test_one_byte_of_the_weights_makes_another_digest(tmp_path: Path) -> None:
    # Beyond the first chunk that is read.
    weights = bytes(fingerprint._CHUNK_BYTES + 10)
    one = model(tmp_path / "one", weights)
    other = model(tmp_path / "other", weights[:-1] + b"1")
    assert folder_digest(one, tmp_path / "c") != folder_digest(other, tmp_path / "c")


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "modeling.py", "new.bin"])
def test_configurations_code_and_further_weights_count(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "model")
    before = folder_digest(folder, tmp_path / "c")
    (folder / name).write_text("other")
    assert folder_digest(folder, tmp_path / "c") != before


@pytest.mark.parametrize("replaced", [True, False])
def test_weights_of_equal_name_size_and_time_are_told_apart(tmp_path: Path, replaced: bool) -> None:
    folder = model(tmp_path / "model", b"0123")
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 0))
    before = folder_digest(folder, tmp_path / "c")
    if replaced:
        (tmp_path / "new").write_bytes(b"3210")
        (tmp_path / "new").replace(file)
    else:
        file.write_bytes(b"3210")
    os.utime(file, ns=(0, 0))
    assert folder_digest(folder, tmp_path / "c") != before


def test_a_digest_is_read_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = model(tmp_path / "model"), tmp_path / "cache"
    digest = folder_digest(folder, cache)
    assert not cache.exists(), "the files are too young to be known by their time"
    monkeypatch.setattr(fingerprint, "_TIMESTAMP_NS", 10**7)
    time.sleep(0.05)
    assert folder_digest(folder, cache) == digest
    kept = list(cache.iterdir())
    assert len(kept) == 2
    for file in kept:
        file.write_text("from the cache")
    assert folder_digest(folder, cache).count("from the cache") == 2
    (folder / "model.safetensors").write_bytes(b"9999")
    assert folder_digest(folder, cache).count("from the cache") == 1


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no weights in"):
        folder_digest(tmp_path, tmp_path / "c")
