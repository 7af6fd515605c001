"""Replicas by load: a second one within seconds, and none that a stream is on is ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE, Platform, simulated, stream
from tests.e2e.test_admin import model_state, wait_for
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated, pytest.mark.xdist_group("platform")]

NAME = "scaled"
TARGET = 3
RULES = {
    "min": 1,
    "max": 2,
    "target_ongoing_requests": TARGET,
    "upscale_delay_s": 1,
    # A start is longer, on most machines.
    "downscale_delay_s": 5,
}
PROMPTS = [f"Tale {number}. Once upon a time" for number in range(6)]


MODEL = simulated(
    {
        "name": NAME,
        "devices": ["core0", "core1"],
        "replicas": RULES,
        "kv_cache_memory": "256MiB",
        "engine": ENGINE,
    }
)


@pytest.fixture(scope="module")
def platform(simulated_platform: Platform) -> Iterator[Platform]:
    """The one that tests share, with this model beside its own."""
    with simulated_platform.admin() as admin:
        admin.post("/admin/v1/models", json=MODEL).raise_for_status()
        wait_for(lambda: state(simulated_platform)["status"] == "ready", 120)
        yield simulated_platform
        admin.delete(f"/admin/v1/models/{NAME}").raise_for_status()
        wait_for(lambda: model_state(simulated_platform, NAME) is None, 120)


def state(platform: Platform) -> dict[str, Any]:
    found: dict[str, Any] = model_state(platform, NAME)
    return found


def scaled(platform: Platform, direction: str) -> float:
    return platform.metric("loomserve_scaling_decisions_total", model=NAME, direction=direction)


def set_replicas(platform: Platform, replicas: int | str) -> int:
    with platform.admin() as admin:
        said = admin.put(f"/admin/v1/models/{NAME}/replicas", json={"replicas": replicas})
    return int(said.status_code)


def test_load_starts_a_replica_and_quiet_drains_it_without_cutting_a_stream(
    platform: Platform,
) -> None:
    (first,) = state(platform)["replicas"]
    alone = stream(platform, NAME, PROMPTS[0], 120)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        began = time.monotonic()
        answers = list[Future[str]]()
        # Again, where others have the cores and reports are too late for it.
        while not scaled(platform, "up"):
            assert time.monotonic() - began < 15 + PATIENCE_S
            answers = [pool.submit(stream, platform, NAME, prompt, 120) for prompt in PROMPTS]
            until_scaled_or_done(platform, "up", answers)
        assert state(platform)["target_replicas"] == 2
        assert state(platform)["scaling"]["why"].startswith("requests exceed")
        # They may have ended, once it is there: it is not due to them alone.
        wait_for(lambda: len(state(platform)["replicas"]) == 2, 60)
        texts = [each.result() for each in answers]
    assert texts[0] == alone

    with ThreadPoolExecutor(2) as pool:
        last = list[Future[str]]()
        # Two at a time, one on each: few enough for one replica, and never none.
        while not scaled(platform, "down"):
            assert time.monotonic() - began < 150 + PATIENCE_S
            last = [pool.submit(stream, platform, NAME, PROMPTS[0], 120) for _ in range(2)]
            until_scaled_or_done(platform, "down", last)
        assert [each.result() for each in last] == [alone] * len(last)

    def is_first_alone() -> bool:
        now = state(platform)
        there = [each["id"] for each in now["replicas"]]
        return there == [first["id"]] and now["target_replicas"] == 1

    # On a machine that others keep busy the last two may pass for more load, once or twice.
    wait_for(is_first_alone, 120)
    assert platform.metric("loomserve_uncontinued_requests_total", model=NAME) == 0


def until_scaled_or_done(platform: Platform, direction: str, answers: list[Future[str]]) -> None:
    wait_for(lambda: all(each.done() for each in answers) or scaled(platform, direction) > 0, 60)


def test_a_number_that_an_operator_sets_holds_until_it_is_auto(platform: Platform) -> None:
    assert set_replicas(platform, 3) == 400
    assert set_replicas(platform, 1) == 202
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        up = scaled(platform, "up")
        answers = [pool.submit(stream, platform, NAME, prompt, 100) for prompt in PROMPTS]
        assert all(each.result() for each in answers)
        assert scaled(platform, "up") == up
    assert state(platform)["scaling"]["fixed"]
    assert set_replicas(platform, "auto") == 202
    assert not state(platform)["scaling"]["fixed"]
