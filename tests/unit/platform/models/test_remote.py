"""Models of remote folders: fetched once, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.models import catalog
from loomserve.platform.models.remote import folder_of

SOURCE = "memory://bucket/llama"
FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
    "tokenizer.json": b"{}",
    "more/notes.txt": b"in a folder of its own",
    "model.safetensors": save({"weight": np.ones((4, 4), np.float32)}),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def bucket() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    for name, content in FILES.items():
        filesystem.pipe(f"/bucket/llama/{name}", content)
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_remote_folder_is_fetched_whole_and_once(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = catalog.resolve(SOURCE, tmp_path, said.append)
    assert folder == folder_of(SOURCE)
    assert contents(folder) == FILES
    assert said == [f"fetching {SOURCE} (once)"]
    bucket.rm("/bucket/llama/tokenizer.json")
    assert catalog.resolve(SOURCE, tmp_path, said.append) == folder
    assert len(said) == 1
    bucket.pipe("/bucket/llama/tokenizer.json", b"{}")


def test_two_that_want_it_at_once_fetch_it_once(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        folders = list(
            threads.map(lambda _: catalog.resolve(SOURCE, tmp_path, said.append), range(4))
        )
    assert set(folders) == {folder_of(SOURCE)}
    assert len(said) == 1


def test_a_folder_of_this_machine_may_be_named_as_an_address(tmp_path: Path) -> None:
    for name, content in FILES.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder = catalog.resolve(f"file://{tmp_path}/there", tmp_path, lambda line: None)
    assert isinstance(folder, Path)
    assert contents(folder) == FILES


def test_addresses_that_share_a_name_have_copies_of_their_own() -> None:
    assert folder_of("s3://one/llama") != folder_of("s3://two/llama")
    assert folder_of("s3://one/llama").name.startswith("llama-")


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("memory://bucket/nothing", "there is no such folder"),
        ("memory://bucket/llama/config.json", "there is no such folder"),
        ("nobody://bucket/llama", "install what fsspec needs"),
    ],
)
def test_what_is_no_remote_folder_is_named(source: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        catalog.resolve(source, tmp_path, lambda line: None)


def test_what_was_cut_short_is_not_kept(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = bucket.get

    def cut_short(there: str, here: str, **options: object) -> None:
        get(there, here, **options)
        (Path(here) / "model.safetensors").write_bytes(b"half")

    monkeypatch.setattr(type(bucket), "get", staticmethod(cut_short))
    with pytest.raises(StartError, match="cut short"):
        catalog.resolve(SOURCE, tmp_path, lambda line: None)
    assert not folder_of(SOURCE).exists()
    monkeypatch.undo()
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    assert contents(catalog.resolve(SOURCE, tmp_path, lambda line: None)) == FILES  # type: ignore[arg-type]


def test_one_that_is_no_model_is_told_with_its_copy(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    bucket.pipe("/bucket/llama/config.json", b"{}")
    with pytest.raises(ConfigError, match=r"names no architectures.*delete .* made again"):
        catalog.resolve(SOURCE, tmp_path, lambda line: None)
