"""What an operator does while requests run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loomserve.platform.engine.hooks import TESTED_VERSIONS
from tests.e2e.conftest import COLD, COLD_MODEL, HOT, Platform, simulated
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]


def wait_for(
    what: Callable[[], bool], timeout_s: float, seen: Callable[[], object] | None = None
) -> None:
    """Fail if it does not come, and tell what there is instead.

    Args:
        timeout_s: how long it may take on a machine that has nothing else to do.
    """
    deadline = time.monotonic() + timeout_s + PATIENCE_S
    while not what():
        if time.monotonic() >= deadline:
            told = f"; there is {seen()}" if seen is not None else ""
            pytest.fail(f"it did not happen in time{told}")
        time.sleep(0.25)


def model_state(platform: Platform, name: str) -> dict[str, Any] | None:
    models = platform.state()["models"]
    return next((model for model in models if model["name"] == name), None)


def ask(platform: Platform, model: str, tokens: int = 2) -> str:
    answer = platform.client().completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == tokens
    return answer.choices[0].text


def test_the_state_names_devices_models_replicas_loads_and_versions(platform: Platform) -> None:
    state = platform.state()
    assert [device["name"] for device in state["devices"]] == ["core0", "core1"]
    assert {model["name"] for model in state["models"]} == {HOT, COLD}
    replicas = model_state(platform, HOT)["replicas"]
    assert [replica["device"] for replica in replicas] == ["core0", "core1"]
    assert all(replica["load"]["kv_cache_usage"] >= 0 for replica in replicas)
    assert state["versions"]["vllm"] in TESTED_VERSIONS["vllm"]


def test_metrics_have_each_replica_once(platform: Platform) -> None:
    for model in (HOT, COLD):
        ask(platform, model)
        for replica in model_state(platform, model)["replicas"]:
            labels = {"model": model, "replica": replica["id"], "device": replica["device"]}
            assert platform.metric("loomserve_scrape_up", **labels) == 1
            assert len(platform.samples("vllm:num_requests_running", **labels)) == 1
        assert platform.metric("vllm:generation_tokens_total", model=model) > 0
        assert platform.metric("loomserve_route_decisions_total", model=model) > 0


def test_the_admin_api_documents_itself(platform: Platform) -> None:
    with platform.admin() as admin:
        paths = admin.get("/admin/v1/openapi.json").json()["paths"]
    assert {"/state", "/models", "/models/{name}", "/replicas/{replica_id}/draining"} <= set(paths)


def test_changes_are_in_the_audit_log_and_the_token_is_not(platform: Platform) -> None:
    path = "/admin/v1/kv/flush"
    with platform.admin() as admin, platform.http("lsk-wrong") as stranger:
        headers = {"X-Request-Id": "audited-1"}
        status = admin.post(path, json={"model": HOT}, headers=headers).status_code
        stranger.post(path, json={}, headers={"X-Request-Id": "audited-2"})
    log = platform.log.parent / "audit.log"

    def entries() -> dict[str, Any]:
        told = [json.loads(line) for line in log.read_text().splitlines()]
        return {one["request_id"]: one for one in told}

    wait_for(lambda: {"audited-1", "audited-2"} <= set(entries()), 5)
    done, refused = entries()["audited-1"], entries()["audited-2"]
    assert (done["who"], done["status"], done["body"]) == ("admin", status, {"model": HOT})
    assert (refused["who"], refused["status"]) == (None, 401)
    assert platform.admin_token not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


def test_a_drained_replica_gets_nothing_new_until_it_is_undrained(platform: Platform) -> None:
    drained, other = model_state(platform, HOT)["replicas"]
    path = f"/admin/v1/replicas/{drained['id']}/draining"
    with platform.admin() as admin:
        admin.put(path, json={"draining": True}).raise_for_status()
    time.sleep(5)  # reports and routing statistics must have gone round
    served = lambda replica: platform.metric("vllm:request_success_total", replica=replica["id"])  # noqa: E731
    before = served(drained), served(other)
    for _ in range(6):
        ask(platform, HOT)
    assert (served(drained), served(other)) == (before[0], before[1] + 6)
    with platform.admin() as admin:
        admin.put(path, json={"draining": False}).raise_for_status()
    time.sleep(5)
    # Gateways have connected anew, and count from nothing.
    again = served(drained)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(platform, HOT, tokens=32), range(8)))
    assert served(drained) > again


def test_bad_admin_requests_say_what_to_do(platform: Platform) -> None:
    with platform.admin() as admin:
        unknown = admin.delete("/admin/v1/models/gpt-9")
        assert unknown.status_code == 404
        assert HOT in unknown.json()["error"]["message"]
        many = admin.put(f"/admin/v1/models/{HOT}/replicas", json={"replicas": 3})
        assert many.status_code == 400
        assert "1 to 2" in many.json()["error"]["message"]
        twice = admin.post(
            "/admin/v1/models", json={"name": HOT, "source": "demo", "devices": ["core0"]}
        )
        assert twice.status_code == 409
        nowhere = admin.post(
            "/admin/v1/models", json={"name": "new", "source": "demo", "devices": ["moon"]}
        )
        assert nowhere.status_code == 400
        assert "moon" in nowhere.json()["error"]["message"]
        odd = admin.post("/admin/v1/models", json={"name": "new", "color": "red"})
        assert 400 <= odd.status_code < 500
        assert (
            admin.put("/admin/v1/replicas/none/draining", json={"draining": True}).status_code
            == 404
        )


def test_unload_lets_a_running_stream_finish_and_load_brings_the_model_back(
    platform: Platform,
) -> None:
    texts: list[str] = []
    stream = threading.Thread(target=lambda: texts.append(ask(platform, COLD, tokens=150)))
    stream.start()
    wait_for(lambda: platform.metric("vllm:num_requests_running", model=COLD) == 1, 10)
    with platform.admin() as admin:
        answer = admin.delete(f"/admin/v1/models/{COLD}")
        assert answer.status_code == 202
        assert model_state(platform, COLD)["status"] == "unloading"
        refused = platform.http().post(
            "/v1/completions", json={"model": COLD, "prompt": "x", "max_tokens": 1}
        )
        assert refused.status_code == 404
        stream.join(60)
        assert texts, "the running request was cut"
        wait_for(lambda: model_state(platform, COLD) is None, 60)
        assert ask(platform, HOT)
        assert admin.post("/admin/v1/models", json=simulated(COLD_MODEL)).status_code == 202
    wait_for(lambda: model_state(platform, COLD)["status"] == "ready", 240)
    assert ask(platform, COLD)


def test_a_model_that_cannot_start_says_why_and_can_be_removed(platform: Platform) -> None:
    model = {
        "name": "broken",
        "source": "demo",
        "devices": ["core0"],
        # More than the model's own.
        "engine": {"max_model_len": 10_000_000},
    }
    with platform.admin() as admin:
        mistyped = {**model, "engine": {"max_modell_len": 5}}
        assert admin.post("/admin/v1/models", json=mistyped).status_code == 400
        assert admin.post("/admin/v1/models", json=model).status_code == 202
        wait_for(lambda: model_state(platform, "broken")["status"] == "failed", 120)
        assert "max_model_len" in model_state(platform, "broken")["message"]
        assert admin.delete("/admin/v1/models/broken").status_code == 202
    wait_for(lambda: model_state(platform, "broken") is None, 30)


@pytest.mark.slow
def test_a_model_can_be_scaled_down_and_up_while_it_serves(platform: Platform) -> None:
    path = f"/admin/v1/models/{HOT}/replicas"
    with platform.admin() as admin:
        assert admin.put(path, json={"replicas": 1}).status_code == 202
        wait_for(lambda: len(model_state(platform, HOT)["replicas"]) == 1, 60)
        ask(platform, HOT)
        assert admin.put(path, json={"replicas": 2}).status_code == 202
        wait_for(lambda: len(model_state(platform, HOT)["replicas"]) == 2, 240)
    devices = [replica["device"] for replica in model_state(platform, HOT)["replicas"]]
    assert devices == ["core0", "core1"]


def test_a_name_with_a_tag_is_a_name_like_others(platform: Platform) -> None:
    name, path = "qwen2.5:7b", "/admin/v1/models/qwen2.5:7b"
    with platform.admin() as admin:
        body = {**simulated(COLD_MODEL), "name": name, "devices": ["core0"]}
        assert admin.post("/admin/v1/models", json=body).status_code == 202
        wait_for(lambda: model_state(platform, name)["status"] == "ready", 240)
        assert ask(platform, name)
        assert platform.client().models.retrieve(name).id == name
        assert platform.metric("loomserve_route_decisions_total", model=name) > 0
        assert admin.put(f"{path}/replicas", json={"replicas": 1}).status_code == 202
        assert admin.put("/admin/v1/aliases/chat:latest", json={"models": {name: 1}}).is_success
        assert ask(platform, "chat:latest")
        assert admin.delete("/admin/v1/aliases/chat:latest").is_success
        bad = admin.post("/admin/v1/models", json={**body, "name": ":7b"})
        assert bad.status_code == 400
        assert "is no name: use up to 127 letters" in bad.json()["error"]["message"]
        assert admin.delete(path).status_code == 202
    wait_for(lambda: model_state(platform, name) is None, 60)
