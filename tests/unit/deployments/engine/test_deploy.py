"""Models that are handed to Serve at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loomserve.deployments.engine import deploy
from loomserve.deployments.engine.deploy import Handed, hand_to_serve
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.messages import EngineSpec
from tests.unit.deployments.engine.test_app import spec_of


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Devices of the applications that would run; threads take turns as often as they can."""
    devices: list[str] = []

    def run(spec: EngineSpec, apps: Mapping[str, Any]) -> None:
        devices.extend(apps)

    monkeypatch.setattr(deploy, "run_replicas", run)
    monkeypatch.setattr(deploy, "fetch_from_hub", lambda *_: None)
    monkeypatch.setattr(deploy.catalog, "resolve", lambda *_, **__: Path("/weights"))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield devices
    sys.setswitchinterval(before)


def test_several_models_are_handed_to_serve_at_once(handed: list[str]) -> None:
    names = [f"d{at}" for at in range(40)]
    model = Model(name="m", source="org/m", devices=tuple(names))
    spec = spec_of(model, *(Device(name=name, cores=(0,)) for name in names))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda name: hand_to_serve(spec, [name], "/"), names))
    assert sorted(handed) == sorted(names)
    assert all(isinstance(each, Handed) and each.problem is None for each in results)
