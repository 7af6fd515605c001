"""Names and sources are enough: the platform finds devices, and puts models and loans on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loomserve.platform.placement.plan import plan_of_platform
from loomserve.platform.state import PlatformState
from tests.e2e.conftest import ENGINE, Platform, server_section, started
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

NAMES = ("one", "two", "three", "four", "five")
# A float32 token of the model has 46 KB of KV: two of the prompts below fill this.
KV = "48MiB"


def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    model = {"source": "demo", "kv_cache_memory": KV, "engine": ENGINE}
    return {
        "models": {name: dict(model) for name in NAMES},
        "elastic": {"residence_s": 2},
        "server": server_section(port, hashes),
    }


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with started(tmp_path_factory.mktemp("by_itself"), configured) as running:
        yield running


def ask(platform: Platform, name: str, prompt: str = "Once upon a time", tokens: int = 8) -> str:
    answer = platform.client().completions.create(
        model=name,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        timeout=120,
    )
    return answer.choices[0].text


def until(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def test_devices_their_memory_and_first_models_are_found(platform: Platform) -> None:
    state = platform.state()
    devices = {each["name"]: each for each in state["devices"]}
    assert all(each["memory"] > 2**30 for each in devices.values())
    models = {each["name"]: each for each in state["models"]}
    assert models.keys() == set(NAMES)
    # Each device has the first that fell to it; the others come when they are asked for.
    there = [each for each in models.values() if each["status"] == "ready"]
    assert len(there) == min(len(devices), len(NAMES))
    assert len({each["replicas"][0]["device"] for each in there}) == len(there)
    assert all(each["status"] == "unloaded" for each in models.values() if each not in there)
    assert all("had the most room" in each["placement"] for each in there)
    plan = plan_of_platform(PlatformState.model_validate(state))
    assert [(each.name, bool(each.why)) for each in plan.models] == [(x, True) for x in NAMES]


def test_all_names_answer_asked_for_at_once(platform: Platform) -> None:
    with ThreadPoolExecutor(len(NAMES)) as pool:
        answers = list(pool.map(lambda name: ask(platform, name), NAMES))
    assert len(set(answers)) == 1
    models = {each["name"]: each for each in platform.state()["models"]}
    assert models["five"]["placement"].split()[1:4] == ["has", "least", "to"]


def test_a_model_without_devices_is_loaded_over_http(platform: Platform) -> None:
    with platform.admin() as admin:
        late = {"name": "late", "source": "demo", "kv_cache_memory": KV, "engine": ENGINE}
        admin.post("/admin/v1/models", json=late).raise_for_status()
        assert ask(platform, "late") == ask(platform, "one")
        admin.delete("/admin/v1/models/late").raise_for_status()


def loans(platform: Platform) -> list[tuple[str, str]]:
    with platform.admin() as admin:
        state = admin.get("/admin/v1/lending").raise_for_status().json()
    return [(each["borrower"], each["lender"]) for each in state["loans"]]


def test_a_hot_model_borrows_from_a_cold_one_and_gives_back(platform: Platform) -> None:
    devices = {each["name"] for each in platform.state()["devices"]}
    if len(devices) < 2:
        pytest.skip("a lender is on another device")
    ask(platform, "one")
    prompts = [f"{number}: " + "the quick brown fox jumps over it " * 60 for number in range(5)]
    alone = ask(platform, "one", prompts[0], 60)
    until(lambda: ready_on(platform) >= 2)
    time.sleep(6)  # so that somebody else has had nothing to do
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, platform, "one", each, 60) for each in prompts]
        until(lambda: any(borrower == "one" for borrower, _ in loans(platform)))
        answers = [each.result() for each in asked]
    assert answers[0] == alone
    until(lambda: not loans(platform), timeout_s=40)


def ready_on(platform: Platform) -> int:
    """How many devices have a model that is ready."""
    models = platform.state()["models"]
    return len(
        {
            replica["device"]
            for each in models
            for replica in each["replicas"]
            if not replica["asleep"]
        }
    )
