"""A Serve that is made up, for all tests of the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from loomserve.deployments.controller import controller as module
from loomserve.deployments.controller import models as lifecycle
from loomserve.deployments.controller import nodes as node_keeper
from tests.unit.deployments.controller.controllers import FakeServe


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "ServeApps", lambda *_: fake)
    monkeypatch.setattr(module, "wishes_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "_TICK_S", 0.02)
    monkeypatch.setattr(node_keeper, "_PERIOD_S", 0.02)
    for name in ("_POLL_S", "_UNLOAD_KNOWN_S"):
        monkeypatch.setattr(lifecycle, name, 0.01)
    # In which a test that waits for a core sees that a model has failed.
    for name in ("_FIRST_RETRY_S", "_LAST_RETRY_S"):
        monkeypatch.setattr(lifecycle, name, 0.5)
    return fake
