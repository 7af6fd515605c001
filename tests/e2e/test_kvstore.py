"""KV blocks that outlive the engine that made them, and a store that may die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.forks import descendants
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

TOKENS_A_BLOCK = 32


def new_prompt() -> str:
    """Some ten blocks that nobody has computed before."""
    return f"{uuid.uuid4().hex} " + "Once upon a time there was a fox. " * 40


def complete(platform: Platform, prompt: str) -> tuple[str, int]:
    """The greedy continuation, and how many of the prompt's tokens were not computed for it."""
    answer = platform.client().completions.create(
        model=HOT, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details else 0


def kv(platform: Platform) -> dict[str, Any]:
    with platform.admin() as admin:
        return dict(admin.get("/admin/v1/kv").raise_for_status().json())


def blocks(platform: Platform) -> int:
    return sum(model["blocks_in_memory"] for model in kv(platform)["models"])


def hit_blocks(platform: Platform) -> float:
    """Of all models: the platform's own have blocks in common, which count for whoever is first."""
    return platform.metric("loomserve_kv_hit_blocks_total")


def settled_blocks(platform: Platform) -> int:
    """Once engines have forgotten the unfilled blocks of answers that have ended."""
    seen = [-1]

    def settled() -> bool:
        time.sleep(1)
        seen.append(blocks(platform))
        return seen[-1] == seen[-2]

    wait_for(settled, 20)
    return seen[-1]


def store_process(platform: Platform) -> psutil.Process:
    children = descendants(platform.process)
    return next(child for child in children if child.cmdline()[:1] == ["ray::StoreActor"])


def store_answers(platform: Platform) -> bool:
    with platform.admin() as admin:
        return admin.get("/admin/v1/kv").status_code == 200


@contextmanager
def only_on(platform: Platform, device: str) -> Iterator[Callable[[str], None]]:
    """All requests go to the replica on this device, or the one that is named after it."""

    def turn_to(device: str | None) -> None:
        with platform.admin() as admin:
            replicas = model_state(platform, HOT)["replicas"]
            # There is always one that takes them.
            for replica in sorted(replicas, key=lambda each: each["device"] != device):
                path = f"/admin/v1/replicas/{replica['id']}/draining"
                draining = device not in (None, replica["device"])
                admin.put(path, json={"draining": draining}).raise_for_status()
        time.sleep(5)  # reports and routing statistics must have gone round

    turn_to(device)
    yield turn_to
    turn_to(None)


@pytest.mark.claim("kv from memory")
def test_a_prompt_computed_by_one_replica_is_not_computed_by_another(platform: Platform) -> None:
    prompt, before = new_prompt(), hit_blocks(platform)
    with only_on(platform, "core0") as turn_to:
        text, cached = complete(platform, prompt)
        assert cached == 0
        settled_blocks(platform)
        turn_to("core1")
        again, cached = complete(platform, prompt)
    assert cached > 5 * TOKENS_A_BLOCK
    assert again == text
    assert hit_blocks(platform) >= before + 5


@pytest.mark.slow
def test_requests_that_make_room_for_others_come_back_from_the_store(platform: Platform) -> None:
    swapped = "loomserve_preemptions_total"
    prompts = [new_prompt() for _ in range(16)]

    def ask(prompt: str) -> str:
        answer = platform.client().completions.create(
            model=HOT, prompt=prompt, max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    with only_on(platform, "core0"):
        before = platform.metric(swapped, model=HOT, mode="swap")
        # More than the engine's memory holds at their ends.
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
        assert platform.metric(swapped, model=HOT, mode="swap") > before
        time.sleep(3)  # a report must have come
        replicas = model_state(platform, HOT)["replicas"]
        figures = next(r["load"]["scheduling"] for r in replicas if r["device"] == "core0")
        assert (figures["queue"], figures["preemption"]) == ("fcfs", "adaptive")
        assert figures["swapped_out"] == figures["swapped_in"] > 0
        assert figures["swap_used_bytes"] == 0 < figures["swap_capacity_bytes"]
        assert [ask(prompt) for prompt in prompts[:2]] == together[:2]


def test_the_command_shows_the_store_and_empties_it(platform: Platform) -> None:
    complete(platform, new_prompt())
    wait_for(lambda: blocks(platform) > 0, 5)
    before = platform.metric("loomserve_kv_used_bytes", tier="memory")
    table = command(platform, "kv")
    rows = {cells[0]: cells for line in table.splitlines() if (cells := line.split())}
    for model in kv(platform)["models"]:
        assert str(model["blocks_in_memory"]) in rows[model["model"]]

    def flushed() -> bool:
        assert "blocks forgotten" in command(platform, "kv", "flush")
        return blocks(platform) == 0

    # What an engine had that was killed is leased a while.
    wait_for(flushed, PATIENCE_S)
    assert platform.metric("loomserve_kv_used_bytes", tier="memory") < before
    with pytest.raises(subprocess.CalledProcessError) as refused:
        command(platform, "kv", "flush", "gpt-9")
    assert HOT in refused.value.stderr


def command(platform: Platform, *words: str) -> str:
    return subprocess.run(
        [Path(sys.executable).parent / "loomserve", *words, "--url", platform.url],
        env={**os.environ, "LOOMSERVE_ADMIN_TOKEN": platform.admin_token, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_only_the_operator_sees_and_changes_the_store(platform: Platform) -> None:
    with platform.http() as client:
        assert client.get("/admin/v1/kv").status_code == 401
        assert client.post("/admin/v1/kv/flush", json={}).status_code == 401
        assert client.post("/admin/v1/kv/pin", json={}).status_code == 401


def test_what_is_pinned_survives_a_flush_until_it_is_let_go(platform: Platform) -> None:
    prompt = new_prompt()
    pin = {"model": HOT, "prompt": prompt, "api_key": "all"}
    with platform.admin() as admin:
        answer = admin.post("/admin/v1/kv/pin", json={**pin, "pinned": True})
        assert answer.status_code == 200, answer.text
        pinned = answer.json()["blocks"]
        assert pinned == answer.json()["prompt_tokens"] // TOKENS_A_BLOCK > 5

        def flushed() -> bool:
            admin.post("/admin/v1/kv/flush", json={}).raise_for_status()
            return blocks(platform) == pinned

        wait_for(flushed, PATIENCE_S)
        released = admin.post("/admin/v1/kv/pin", json={**pin, "pinned": False})
        assert released.json()["blocks"] == pinned
        admin.post("/admin/v1/kv/flush", json={}).raise_for_status()
        assert blocks(platform) == 0
        unknown = admin.post("/admin/v1/kv/pin", json={**pin, "model": "gpt-9", "pinned": True})
    assert unknown.status_code == 404


def test_a_quota_that_the_store_does_not_know_is_refused(platform: Platform) -> None:
    model = {"name": "new", "source": "demo", "devices": ["core0"], "kvstore_quota": "10MiB"}
    with platform.admin() as admin:
        answer = admin.post("/admin/v1/models", json=model)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kvstore_quota"


def test_a_client_may_not_speak_to_the_connector(platform: Platform) -> None:
    with pytest.raises(openai.BadRequestError, match="the platform's own channel"):
        platform.client().completions.create(
            model=HOT,
            prompt="x",
            max_tokens=1,
            extra_body={"kv_transfer_params": {"loomserve_prompt_chain": True}},
        )


@pytest.mark.slow
def test_a_killed_store_fails_no_request_and_comes_back_with_its_blocks(
    platform: Platform,
) -> None:
    prompt = new_prompt()
    with only_on(platform, "core0"):
        text, _ = complete(platform, prompt)
    wait_for(lambda: blocks(platform) > 5, 5)
    before = settled_blocks(platform)
    stream = platform.client().completions.create(
        model=HOT, prompt="Once", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    killed = store_process(platform)
    killed.kill()
    began = time.monotonic()
    complete(platform, new_prompt())
    assert time.monotonic() - began < PATIENCE_S, "a request hung while the store was away"
    assert sum(bool(chunk.choices) for chunk in stream) > 100, "the stream was cut"
    wait_for(lambda: store_answers(platform), 30)
    assert store_process(platform).pid != killed.pid
    assert blocks(platform) >= before
    time.sleep(2)  # engines ask a store that was away only once a second
    with only_on(platform, "core1"):
        again, cached = complete(platform, prompt)
    assert cached > 5 * TOKENS_A_BLOCK
    assert again == text
