"""Models that are handed to Serve at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig

from loomserve.deployments.engine import app
from loomserve.deployments.engine.app import Handed, applications, hand_to_serve
from loomserve.platform.config import Device, Model
from loomserve.platform.fleet.messages import EngineSpec
from tests.unit.deployments.engine.test_app import spec_of


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Devices of the applications that would run; threads take turns as often as they can."""
    devices: list[str] = []

    def run(spec: EngineSpec, apps: Mapping[str, Any]) -> None:
        assert begun >= apps.keys(), "a replica would wait for its engine"
        devices.extend(apps)

    begun = set[str]()
    monkeypatch.setattr(app, "begin", lambda orders: begun.update(o.device for o in orders))
    monkeypatch.setattr(app, "run_replicas", run)
    monkeypatch.setattr(app, "fetch_from_hub", lambda *_: None)
    monkeypatch.setattr(app.catalog, "resolve", lambda *_, **__: Path("/weights"))
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


def test_states_of_applications_are_read_meanwhile(
    handed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> SimpleNamespace:
        RequestRouterConfig()  # as Serve makes of each deployment that it has
        return SimpleNamespace(applications={})

    monkeypatch.setattr(app.serve, "status", status)
    names = [f"d{at}" for at in range(20)]
    model = Model(name="m", source="org/m", devices=tuple(names))
    spec = spec_of(model, *(Device(name=name, cores=(0,)) for name in names))
    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(applications) for _ in names]
        results = list(pool.map(lambda name: hand_to_serve(spec, [name], "/"), names))
        assert [each.result() for each in read] == [{}] * len(names)
    assert [each.problem for each in results] == [None] * len(names)
