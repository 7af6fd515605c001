"""Where operators' wishes are kept on a node of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.deployments.ray_node import wishes_folder
from loomserve.platform.nodes.node import STATE_VARIABLE


def test_wishes_outlive_ray_on_their_node_and_end_with_their_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    folder = wishes_folder("one")
    folder.mkdir(parents=True)
    (folder / "wishes.sqlite").touch()
    assert wishes_folder("one") == folder
    assert (folder / "wishes.sqlite").exists()
    other = wishes_folder("two")
    assert other != folder
    assert not folder.exists()
    assert "two" not in str(other), "the token is in no path"
