"""Replicas by the rebalancing controller, which adds one where a device is hot and another cold."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from tests.e2e.conftest import CORES, ENGINE, LOOMSERVE, Platform, server_section, started, stream
from tests.e2e.test_admin import model_state, wait_for

pytestmark = pytest.mark.e2e

PROFILE = "devices.yaml"
NAME = "balanced"
BALANCED = {
    "name": NAME,
    "source": "demo",
    "devices": ["core1", "core0"],
    "replicas": "auto",
    "kv_cache_memory": "256MiB",
    "engine": ENGINE,
}
PROMPTS = [f"Tale {number}. Once upon a time" for number in range(6)]


def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "devices": CORES,
        "models": [BALANCED],
        "rebalancing": {
            "folder": "plans",
            "profile": PROFILE,
            "period_s": 2,
            "confirm_periods": 2,
            "settle_s": 4,
            "stale_after_s": 30,
        },
        "server": server_section(port, hashes),
    }


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with started(tmp_path_factory.mktemp("plans"), configured) as running:
        yield running


@pytest.fixture
def alone_on(platform: Platform) -> str:
    """The device of the only replica of a model that the controller may give more, with all that
    it plans by. Both have started at once, so that either may be the newer one, which left."""
    config = platform.log.parent / "config.yaml"
    command = [LOOMSERVE, "profile", "devices", str(config)]
    command += ["--quick", "--out", str(config.parent / PROFILE)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with platform.admin() as admin:
        admin.put(f"/admin/v1/models/{NAME}/replicas", json={"replicas": 1}).raise_for_status()
        wait_for(lambda: len(_replicas(platform)) == 1, 60)
    wait_for(lambda: not _rebalancing(platform)["flaws"], 60)
    (device,) = _replicas(platform)
    return device


def _replicas(platform: Platform) -> list[str]:
    """The devices of the model's replicas; none unless it is ready."""
    found = model_state(platform, NAME)
    ready = found is not None and found["status"] == "ready"
    return sorted(each["device"] for each in found["replicas"]) if found and ready else []


def _rebalancing(platform: Platform, path: str = "rebalancing") -> Any:
    with platform.admin() as admin:
        return admin.get(f"/admin/v1/{path}").raise_for_status().json()


def test_the_controller_adds_a_replica_on_a_cold_device_by_itself_and_no_answer_changes(
    platform: Platform, alone_on: str
) -> None:
    alone = {prompt: stream(platform, NAME, prompt, 60) for prompt in PROMPTS}
    with platform.admin() as admin:
        admin.put("/admin/v1/rebalancing", json={"mode": "auto"}).raise_for_status()
    enough = Event()

    def ask_on(prompt: str) -> set[str]:
        told = set[str]()
        while not enough.is_set():
            told.add(stream(platform, NAME, prompt, 60))
        return told

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = {prompt: pool.submit(ask_on, prompt) for prompt in PROMPTS}
        try:
            wait_for(lambda: bool(_done(platform)), 300, lambda: _planned(platform))
        finally:
            enough.set()
        assert {prompt: each.result() for prompt, each in asked.items()} == {
            prompt: {text} for prompt, text in alone.items()
        }
    (plan,) = _done(platform)
    assert plan["origin"] == "controller"
    (cold,) = {each["name"] for each in CORES} - {alone_on}
    assert plan["actions"] == [{"action": "add_replica", "model": NAME, "device": cold}]
    assert plan["real_gain"] > 0
    assert _replicas(platform) == ["core0", "core1"]


def _planned(platform: Platform) -> tuple[Any, Any]:
    return _rebalancing(platform), _rebalancing(platform, "plans")


def _done(platform: Platform) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = _rebalancing(platform, "plans")["plans"]
    return [plan for plan in plans if plan["status"] == "done"]
