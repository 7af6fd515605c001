"""Weights that another node has, by Ray's own processes; its home is another than this one's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.adapters.sources import kept_folder
from loomserve.platform.models.catalog import copy_of
from loomserve.platform.models.once import made_once
from tests.integration.ray_node import ray_node

pytestmark = pytest.mark.timeout(240)

SOURCE = "s3://bucket/llama"
DIGEST = "0123abcd"


@pytest.fixture(scope="module", name="peer")
def _peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """What the node has, whose processes have the environment that Ray was started with."""
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "empty.txt": b"",
        "more/large.bin": bytes(range(256)) * 2**17,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOMSERVE_HOME", str(tmp_path_factory.mktemp("peer")))
        folder = copy_of(SOURCE)
        assert folder is not None
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        adapter = kept_folder(DIGEST)
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_bytes(b"{}")
        with ray_node("one"):
            yield files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_model_is_copied_from_a_node_that_has_it(
    peer: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loomserve.deployments import peer_weights

    # Of the two nodes this machine is one, and the other the only one that Ray has.
    monkeypatch.setattr(peer_weights, "own_node", lambda: "two")
    peer_weights.fetch_from_peers(SOURCE)
    folder = copy_of(SOURCE)
    assert folder is not None
    assert contents(folder) == peer


@pytest.mark.usefixtures("peer")
def test_an_adapter_is_copied_under_the_digest_of_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loomserve.deployments import peer_weights

    monkeypatch.setattr(peer_weights, "own_node", lambda: "two")
    for digest in (DIGEST, "another"):
        peer_weights.fetch_from_peers(peer_weights.ADAPTER + digest)
    assert contents(kept_folder(DIGEST)) == {"adapter_config.json": b"{}"}
    assert not kept_folder("another").exists()


@pytest.mark.usefixtures("peer")
def test_what_no_node_has_is_left_to_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    from loomserve.deployments import peer_weights

    monkeypatch.setattr(peer_weights, "own_node", lambda: "two")
    other = "s3://bucket/other"
    peer_weights.fetch_from_peers(other)
    folder = copy_of(other)
    assert folder is not None
    assert not folder.exists()


@pytest.mark.usefixtures("peer")
def test_a_peer_that_has_lost_it_leaves_nothing_behind() -> None:
    from loomserve.deployments import peer_weights

    folder = copy_of("s3://bucket/gone")
    assert folder is not None

    def make(partial: Path) -> Path:
        made: Any = peer_weights.copy_from("one", "s3://bucket/gone", partial)
        return Path(made)

    with pytest.raises(OSError, match="no such model"):
        made_once(folder, make)
    assert not folder.exists()
