"""What an engine's blocks are stored under: apart by adapter, as by all else that makes bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from loomserve.kvstore.engine import namespaces
from loomserve.kvstore.engine.namespaces import Namespaces


def folder(path: Path, content: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


def made(tmp_path: Path, layout: str = "LBHNC", attention: str = "auto") -> Namespaces:
    model = folder(tmp_path / "model", b"base")
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            compute_hash=lambda: "hash",
            get_total_num_hidden_layers=lambda: 2,
        ),
        parallel_config=SimpleNamespace(
            world_size=2, tensor_parallel_size=1, pipeline_parallel_size=2
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=SimpleNamespace(compute_hash=lambda: attention),
    )
    spec: Any = SimpleNamespace(block_size=32, dtype=torch.float32, page_size_bytes=64)
    return Namespaces(config, layout, spec, tmp_path / "digests")


@pytest.fixture
def names(tmp_path: Path) -> Namespaces:
    return made(tmp_path)


def test_blocks_of_a_gpu_are_told_apart_by_what_their_bytes_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(
        *, cpu: bool, avx: str = "AVX2", capability: tuple[int, int] = (9, 0), **options: str
    ) -> bytes:
        monkeypatch.setattr(namespaces.current_platform, "is_cpu", lambda: cpu)
        monkeypatch.setattr(
            namespaces.current_platform, "get_device_capability", lambda: capability
        )
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: avx)
        return made(tmp_path, **options).of_ranks(None)[0]

    on_gpu, on_cpu = of(cpu=False), of(cpu=True)
    # Two machines with the same GPU share blocks, whatever their CPUs are.
    assert of(cpu=False, avx="AVX512") == on_gpu
    different = [
        on_gpu,
        on_cpu,
        of(cpu=False, layout="LBNHC"),
        of(cpu=False, capability=(10, 0)),
        of(cpu=False, attention="FLASHINFER"),
        of(cpu=True, avx="AVX512"),
        of(cpu=True, layout="LBNHC"),
    ]
    assert len(set(different)) == len(different)
    assert of(cpu=True, capability=(10, 0), attention="FLASHINFER") == on_cpu


def test_an_adapter_has_namespaces_of_its_own_by_its_weights(
    names: Namespaces, tmp_path: Path
) -> None:
    one, other = (folder(tmp_path / name, name.encode()) for name in ("one", "other"))
    same = folder(tmp_path / "same", b"one")
    found = [
        tuple(names.of_ranks(LoRARequest(f"a{number}", number, str(path))))
        for number, path in enumerate((one, other, same), start=1)
    ]
    base = tuple(names.of_ranks(None))
    assert len(set(base)) == 2, "one a rank"
    assert found[0] == found[2] != found[1]
    assert not set(base) & {name for each in found for name in each}


def test_other_weights_in_one_folder_are_told_apart_by_the_adapters_name(
    names: Namespaces, tmp_path: Path
) -> None:
    path = folder(tmp_path / "sql", b"first")
    before = names.of_ranks(LoRARequest("sql@1", 1, str(path)))
    folder(path, b"second")
    after = names.of_ranks(LoRARequest("sql@2", 2, str(path)))
    assert before != after
    # Its files are read once: a step needs none of them.
    shutil.rmtree(path)
    assert names.of_ranks(LoRARequest("sql@1", 1, str(path))) == before
    with pytest.raises(FileNotFoundError):
        names.of_ranks(LoRARequest("sql@3", 3, str(path)))
