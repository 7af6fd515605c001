"""Where operators' wishes are kept on a node of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.deployments.ray_node import wishes_folder
from loomserve.platform.nodes.node import STATE_VARIABLE


def test_wishes_outlive_ray_on_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    assert wishes_folder() == tmp_path / "wishes"
