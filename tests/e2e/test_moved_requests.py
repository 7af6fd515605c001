"""A plan of an operator's has streams go on with the other replica, and no client notices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import HOT, Platform, stream
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_lending import admin_plans, get, plan_status, post, profile_devices

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 240
PROMPTS = ("Once upon a time", "The capital of France is")
ASKED = PROMPTS * 3


def replicas(platform: Platform) -> list[dict[str, Any]]:
    """The busiest first."""
    state = model_state(platform, HOT)
    return sorted(state["replicas"], key=lambda each: -in_flight(each))


def in_flight(replica: dict[str, Any]) -> int:
    return int(replica["in_flight"])


def moved(platform: Platform) -> float:
    return platform.metric("loomserve_continued_requests_total", model=HOT, reason="moved")


def made_once_seen(platform: Platform, plan: dict[str, Any]) -> str:
    """Its id. It is refused until heartbeats have told of the requests, up to 4 s later."""
    answers = []

    def is_made() -> bool:
        answers.append(post(platform, "plans", plan))
        return answers[-1].status_code == 201

    wait_for(is_made, 20)
    return str(answers[-1].json()["plan"]["id"])


def test_streams_go_on_with_the_other_replica_as_a_plan_says(platform: Platform) -> None:
    profile_devices(platform)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        told = pool.map(lambda prompt: stream(platform, HOT, prompt, TOKENS), PROMPTS)
        alone = dict(zip(PROMPTS, told, strict=True))
        before = moved(platform)
        answers = [pool.submit(stream, platform, HOT, prompt, TOKENS) for prompt in ASKED]
        wait_for(lambda: in_flight(replicas(platform)[0]) >= 3, 30)
        hot, cold = (each["id"] for each in replicas(platform))
        action = {"action": "move_requests", "engine": hot, "to": cold, "requests": 2}
        plan = made_once_seen(platform, {"actions": [action], "force": True})
        assert f"2 requests of {hot} go on with {cold}" in admin_plans(platform, "show", plan)
        post(platform, f"plans/{plan}/apply").raise_for_status()
        wait_for(lambda: plan_status(platform, plan)[1] in {"settling", "done"}, 30)
        assert not any(each.done() for each in answers), "they ended before they could move"
        assert [each.result() for each in answers] == [alone[prompt] for prompt in ASKED]
    assert moved(platform) == before + 2
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)
    (step,) = get(platform, f"plans/{plan}")["steps"]
    told = [event["message"] for event in get(platform, "rebalancing/events")["events"]]
    assert "2 of 2 requests moved" in told
    assert step["real"]["pause_s"] == 0
    assert platform.metric("loomserve_rebalancing_actions_total", kind="running") == 1
