"""A hot model that borrows memory and attention from a cold one, and all that can end a loan."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.browser import DESKTOP, browser, log_in, open_page, picture, tab
from tests.e2e.conftest import ENGINE, LOOMSERVE, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.forks import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform")]

BORROWER, LENDER = "lending-hot", "lending-cold"
# A block is 1.5 MB, so the borrower holds 45 itself, and no more than five of these prompts.
COLD_MODEL = {
    "name": LENDER,
    "source": "demo",
    "devices": ["core1"],
    "kv_cache_memory": "384MiB",
    "engine": ENGINE,
    "lending": {"lend_memory": "256MiB"},
}
HOT_MODEL = {
    "name": BORROWER,
    "source": "demo",
    "devices": ["core0"],
    "kv_cache_memory": "64MiB",
    "kvstore": False,
    "engine": ENGINE,
    "lending": {"borrow_memory": "192MiB", "lenders": [LENDER], "patience_ms": 2000},
}
PROMPTS = [f"Tale {number}. " + "Once upon a time there was a fox. " * 12 for number in range(12)]
TOKENS = 60


@pytest.fixture(scope="module")
def platform(real_platform: Platform) -> Iterator[Platform]:
    """The one that tests share, with these models beside its own."""
    replace_models(real_platform, (), COLD_MODEL, HOT_MODEL)
    yield real_platform
    there = [name for name in (BORROWER, LENDER) if model_state(real_platform, name)]
    replace_models(real_platform, there)


def replace_models(platform: Platform, gone: Collection[str], *models: dict[str, Any]) -> None:
    """Unload some models, then load others, until these are ready."""
    with platform.admin() as admin:
        for name in gone:
            admin.delete(f"/admin/v1/models/{name}").raise_for_status()
        wait_for(lambda: not any(model_state(platform, name) for name in gone), 120)
        for given in models:
            admin.post("/admin/v1/models", json=given).raise_for_status()
    for given in models:
        wait_for(lambda name=given["name"]: status(platform, name) == "ready", 240, platform.state)


def status(platform: Platform, name: str) -> str | None:
    state = model_state(platform, name)
    return state and state["status"]


def lending_state(platform: Platform) -> dict[str, Any]:
    with platform.admin() as admin:
        state: dict[str, Any] = admin.get("/admin/v1/lending").raise_for_status().json()
    return state


def loans(platform: Platform) -> list[dict[str, Any]]:
    return list(lending_state(platform)["loans"])


def wait_for_loan(platform: Platform) -> dict[str, Any]:
    wait_for(lambda: any(loan["usable_blocks"] for loan in loans(platform)), 120)
    return loans(platform)[0]


def switch(platform: Platform, enabled: bool) -> None:
    path = f"/admin/v1/lending/pairs/{BORROWER}/{LENDER}"
    with platform.admin() as admin:
        admin.put(path, json={"enabled": enabled}).raise_for_status()


def answer(platform: Platform, prompt: str, model: str = BORROWER) -> str:
    stream = platform.client().completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@contextmanager
def asking(
    platform: Platform, prompts: Sequence[str] = PROMPTS, model: str = BORROWER
) -> Iterator[Callable[[], list[str]]]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(answer, platform, prompt, model) for prompt in prompts]
        yield lambda: [one.result(300) for one in running]


@contextmanager
def streaming(platform: Platform) -> Iterator[Callable[[], list[str]]]:
    """All prompts at once; inside, some of them run with the lender."""
    with asking(platform) as answers:
        wait_for(lambda: any(loan["requests"] for loan in loans(platform)), 60)
        yield answers


def broken(platform: Platform) -> float:
    return platform.metric("loomserve_lending_broken_loans_total", model=BORROWER)


@pytest.fixture(scope="module")
def alone(platform: Platform) -> list[str]:
    """What the borrower answers while it borrows nothing."""
    switch(platform, False)
    wait_for(lambda: not loans(platform), 90)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: answer(platform, prompt), PROMPTS))
    switch(platform, True)
    return answers


def test_a_loan_is_opened_by_itself_and_seen_on_both_sides(platform: Platform) -> None:
    loan = wait_for_loan(platform)
    assert (loan["borrower"], loan["lender"], loan["draining"]) == (BORROWER, LENDER, False)
    wait_for(lambda: bool(lending_state(platform)["lent"]), 10)
    (lent,) = lending_state(platform)["lent"]
    assert (lent["name"], lent["borrower"]) == (loan["name"], BORROWER)
    assert lent["blocks"] > 0
    assert platform.metric("loomserve_lending_borrowed_blocks", model=BORROWER, lender=LENDER) > 0
    assert platform.metric("loomserve_lending_lent_blocks", model=LENDER, borrower=BORROWER) > 0
    (replica,) = model_state(platform, BORROWER)["replicas"]
    assert [each["name"] for each in replica["borrowing"]["loans"]] == [loan["name"]]


def test_the_console_shows_a_loan_at_work(platform: Platform) -> None:
    wait_for_loan(platform)
    with streaming(platform) as answers:
        with browser() as running, tab(running, platform.url, **DESKTOP) as page:
            log_in(page, platform.admin_token)
            open_page(page, "fleet", "Fleet")
            page.get_by_role("row").filter(
                has_text=re.compile(f"{BORROWER}.*{LENDER}")
            ).get_by_text(re.compile(r"KV: [1-9]\d* of \d+ blocks")).wait_for()
            picture(page, "loan")
        assert len(answers()) == len(PROMPTS)


@pytest.mark.claim("lending")
def test_answers_are_the_same_with_and_without_a_lender(
    platform: Platform, alone: list[str]
) -> None:
    wait_for_loan(platform)
    tasks = platform.metric("loomserve_lending_tasks_total", model=BORROWER)
    with streaming(platform) as answers:
        assert answers() == alone
    wait_for(lambda: platform.metric("loomserve_lending_tasks_total", model=BORROWER) > tasks, 10)
    wait_for(lambda: loans(platform)[0]["tasks"] > 0, 10)
    loan = loans(platform)[0]
    assert 0 < loan["wait_mean_us"] <= loan["wait_max_us"]
    assert 0 < loan["wait_share"] < 1


@pytest.mark.slow
def test_a_loan_that_is_drained_lets_its_requests_finish(
    platform: Platform, alone: list[str]
) -> None:
    name = wait_for_loan(platform)["name"]
    before = broken(platform)
    with streaming(platform) as answers:
        with platform.admin() as admin:
            path = f"/admin/v1/lending/loans/{name}/drain"
            assert admin.post(path).status_code == 202
        assert answers() == alone
    wait_for(lambda: name not in {loan["name"] for loan in loans(platform)}, 90)
    wait_for(lambda: not lending_state(platform)["lent"], 10)
    assert broken(platform) == before


@pytest.mark.slow
def test_a_lender_that_is_killed_costs_no_answer_and_lends_again(
    platform: Platform, alone: list[str]
) -> None:
    name = wait_for_loan(platform)["name"]
    before = broken(platform)
    (replica,) = model_state(platform, LENDER)["replicas"]
    with streaming(platform) as answers:
        psutil.Process(replica["engine_pid"]).kill()
        assert answers() == alone
    wait_for(lambda: broken(platform) == before + 1, 10)
    wait_for(lambda: status(platform, LENDER) == "ready", 240)
    assert wait_for_loan(platform)["name"] != name


@pytest.mark.slow
def test_a_borrower_that_is_killed_gives_back_what_it_had_and_borrows_again(
    platform: Platform, alone: list[str]
) -> None:
    name = wait_for_loan(platform)["name"]
    (before,) = model_state(platform, BORROWER)["replicas"]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        # They end with their engine, one way or another.
        for prompt in PROMPTS:
            pool.submit(answer, platform, prompt)
        wait_for(lambda: any(loan["requests"] for loan in loans(platform)), 60)
        psutil.Process(before["engine_pid"]).kill()
        wait_for(lambda: name not in {lent["name"] for lent in lending_state(platform)["lent"]}, 60)
    wait_for(lambda: replica_id(platform, BORROWER) not in {None, before["id"]}, 240)
    wait_for(lambda: status(platform, BORROWER) == "ready", 240)
    assert wait_for_loan(platform)["name"] != name
    assert answer(platform, PROMPTS[0]) == alone[0]


def replica_id(platform: Platform, name: str) -> str | None:
    """Of the only one, if it is there."""
    state = model_state(platform, name)
    return next((replica["id"] for replica in state["replicas"]), None) if state else None


@pytest.mark.slow
def test_a_pair_that_is_switched_off_has_its_loan_drained_and_gets_no_other(
    platform: Platform, alone: list[str]
) -> None:
    wait_for_loan(platform)
    with streaming(platform) as answers:
        switch(platform, False)
        assert answers() == alone
    wait_for(lambda: not loans(platform), 90)
    time.sleep(8)  # reports have gone round, and a loan would be there
    assert not loans(platform)
    assert [pair["enabled"] for pair in lending_state(platform)["pairs"]] == [False]
    switch(platform, True)
    wait_for_loan(platform)


def admin_plans(platform: Platform, *words: str) -> str:
    """What the command prints."""
    command = [LOOMSERVE, "admin", "plans", *words]
    command += ["--url", platform.url, "--token", platform.admin_token]
    environment = {**os.environ, "COLUMNS": "250"}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, env=environment
    ).stdout


def get(platform: Platform, path: str) -> Any:
    with platform.admin() as admin:
        return admin.get(f"/admin/v1/{path}").raise_for_status().json()


def post(platform: Platform, path: str, body: object = None) -> httpx.Response:
    with platform.admin() as admin:
        return admin.post(f"/admin/v1/{path}", json=body)


def requests_move(platform: Platform, amount: int, **more: object) -> dict[str, Any]:
    return a_move(platform, kind="requests", amount=amount, **more)


def a_move(platform: Platform, **of: object) -> dict[str, Any]:
    """Between the two replicas that there are."""
    ((borrower,), (lender,)) = (
        model_state(platform, name)["replicas"] for name in (BORROWER, LENDER)
    )
    return {"action": "move", "engine": borrower["id"], "lender": lender["id"], **of}


@pytest.fixture(scope="module")
def measured(platform: Platform) -> Platform:
    """With everything seen that plans are made of."""
    profile_devices(platform)
    return platform


def profile_devices(platform: Platform) -> None:
    """Once, for all who make plans."""
    config = platform.log.parent / "config.yaml"
    profile = config.parent / "devices.yaml"
    command = [LOOMSERVE, "profile", "devices", str(config)]
    if not profile.exists():
        assert get(platform, "rebalancing")["flaws"]
        command += ["--quick", "--out", str(profile)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    wait_for(lambda: not get(platform, "rebalancing")["flaws"], 120)


def plan_status(platform: Platform, plan: str) -> tuple[str, str]:
    found = get(platform, f"plans/{plan}")
    return found["status"], found["steps"][0]["status"]


@pytest.mark.slow
def test_a_plan_limits_a_loan_is_measured_and_remembered(
    measured: Platform, alone: list[str]
) -> None:
    wait_for_loan(measured)
    refused = post(measured, "plans", {"actions": [requests_move(measured, 1)], "force": True})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "not_movable"
    with streaming(measured) as answers:
        # So much less than lies there that a block, at least, must go.
        wish = {"actions": [requests_move(measured, 1, back=True)], "force": True}
        made = post(measured, "plans", wish)
        assert made.status_code == 201, made.text
        plan = made.json()["plan"]["id"]
        assert plan in admin_plans(measured)
        assert "carried out" in admin_plans(measured, "apply", plan)
        wait_for(lambda: plan_status(measured, plan)[1] in {"settling", "done"}, 60)
        assert answers() == alone
    wait_for(lambda: plan_status(measured, plan)[0] == "done", 120)
    (step,) = get(measured, f"plans/{plan}")["steps"]
    assert step["moved_bytes"] > 0
    assert step["real"]["duration_s"] > 0
    assert set(step["loads_before"]) == set(step["loads_after"]) == {"core0", "core1"}
    (pair,) = lending_state(measured)["pairs"]
    assert list(pair["limits"]) == ["core0"]
    events = get(measured, "rebalancing/events")["events"]
    assert {"proposed", "started", "begun", "done"} <= {
        event["kind"] for event in events if event["plan"] == plan
    }
    assert "done" in admin_plans(measured, "events")
    assert measured.metric("loomserve_rebalancing_actions_total", kind="requests") == 1
    assert measured.metric("loomserve_rebalancing_utilisation", device="core0") > 0


@pytest.mark.slow
def test_a_plan_that_is_aborted_under_way_is_taken_back(
    measured: Platform, alone: list[str]
) -> None:
    (pair,) = lending_state(measured)["pairs"]
    with streaming(measured) as answers:
        wish = {"actions": [requests_move(measured, 2**20)], "force": True}
        plan = post(measured, "plans", wish).raise_for_status().json()["plan"]["id"]
        post(measured, f"plans/{plan}/apply").raise_for_status()
        wait_for(lambda: plan_status(measured, plan)[1] == "running", 60)
        assert lending_state(measured)["pairs"][0]["limits"] != pair["limits"]
        # At once, for it is done with the borrower's next reports.
        post(measured, f"plans/{plan}/abort").raise_for_status()
        assert answers() == alone
    wait_for(lambda: plan_status(measured, plan) == ("cancelled", "aborted"), 60)
    assert lending_state(measured)["pairs"][0]["limits"] == pair["limits"]
    assert post(measured, f"plans/{plan}/apply").status_code == 409
    listed = get(measured, "plans")["plans"]
    assert [each["status"] for each in listed][:2] == ["cancelled", "done"]
    switch(measured, True)
    assert not lending_state(measured)["pairs"][0]["limits"]


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        pytest.param("heads", 1, marks=pytest.mark.claim("heads")),
        pytest.param("layers", 10, marks=pytest.mark.claim("layers")),
    ],
)
def test_parts_go_and_come_home_by_plans_while_streams_go_on(
    measured: Platform, alone: list[str], kind: str, amount: int
) -> None:
    own, before = own_blocks(measured), moves_done(measured, kind)
    wait_for_loan(measured)
    with streaming(measured) as answers:
        plan = carry_out(measured, a_move(measured, kind=kind, amount=amount))
        wait_for(lambda: parts(measured) == ["away"], 60)
        assert answers() == alone
    more = own_blocks(measured)
    # One plan at a time, and this one is measured yet.
    wait_for(lambda: plan_status(measured, plan)[0] == "done", 120)
    with asking(measured, PROMPTS[:6]) as answers:
        plan = carry_out(measured, a_move(measured, kind=kind, amount=amount, back=True))
        assert answers() == alone[:6]
    wait_for(lambda: not parts(measured), 60)
    wait_for(lambda: plan_status(measured, plan)[0] == "done", 120)
    assert own_blocks(measured) == own < more
    assert moves_done(measured, kind) == before + 2


def moves_done(platform: Platform, kind: str) -> int:
    events = get(platform, "rebalancing/events")["events"]
    done = [each["action"] for each in events if each["kind"] == "done"]
    return sum(action.get("kind") == kind for action in done)


def own_blocks(platform: Platform) -> int:
    (replica,) = model_state(platform, BORROWER)["replicas"]
    return int(replica["borrowing"]["own_blocks"])


def carry_out(platform: Platform, action: dict[str, Any]) -> str:
    """The plan, once it is done but for its measurement."""
    made = post(platform, "plans", {"actions": [action], "force": True})
    assert made.status_code == 201, made.text
    plan = made.json()["plan"]["id"]
    post(platform, f"plans/{plan}/apply").raise_for_status()

    def step() -> Any:
        return get(platform, f"plans/{plan}")["steps"][0]

    wait_for(lambda: step()["status"] not in {"pending", "running"}, 120, step)
    assert step()["status"] in {"settling", "done"}, step()
    return str(plan)


def parts(platform: Platform) -> list[str]:
    """The phases of the parts that are with a lender."""
    return [loan["shard"]["phase"] for loan in loans(platform) if loan["shard"] is not None]


def test_the_controller_is_switched_and_remembers_over_its_restart(measured: Platform) -> None:
    listed = get(measured, "plans")["plans"]
    assert "advise" in admin_plans(measured, "mode", "advise")
    admin_plans(measured, "pause")
    (controller,) = (
        process
        for process in descendants(measured.process)
        if "loomserve-controller" in " ".join(process.cmdline())
    )
    controller.kill()
    wait_for(lambda: remembered(measured) == ("advise", True, None), 120)
    assert [each["id"] for each in get(measured, "plans")["plans"]][-len(listed) :] == [
        each["id"] for each in listed
    ]
    admin_plans(measured, "resume")
    admin_plans(measured, "mode", "off")
    assert remembered(measured) == ("off", False, None)


def remembered(platform: Platform) -> tuple[str, bool, str | None] | None:
    with platform.admin() as admin:
        answer = admin.get("/admin/v1/rebalancing")
    if not answer.is_success:
        return None
    state = answer.json()
    return state["mode"], state["paused"], state["problem"]


def test_what_cannot_be_done_is_said_with_what_there_is(platform: Platform) -> None:
    name = wait_for_loan(platform)["name"]
    with platform.admin() as admin:
        pair = admin.put(f"/admin/v1/lending/pairs/{LENDER}/{BORROWER}", json={"enabled": False})
        assert pair.status_code == 404
        assert f"{BORROWER}/{LENDER}" in pair.json()["error"]["message"]
        loan = admin.post("/admin/v1/lending/loans/none/drain")
        assert loan.status_code == 404
        assert re.search(rf"the loans are: .*{name}", loan.json()["error"]["message"])
        lonely = {**HOT_MODEL, "name": "lonely", "lending": {"borrow_memory": "1MiB",
                                                            "lenders": [BORROWER]}}  # fmt: skip
        refused = admin.post("/admin/v1/models", json=lonely)
        assert refused.status_code == 400
        assert f"cannot borrow from '{BORROWER}'" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_lender_that_is_unloaded_ends_its_loans_first(
    platform: Platform, alone: list[str]
) -> None:
    wait_for_loan(platform)
    before = broken(platform)
    with streaming(platform) as answers:
        with platform.admin() as admin:
            path = f"/admin/v1/models/{LENDER}"
            admin.delete(path, params={"timeout_s": 300}).raise_for_status()
        assert answers() == alone
    wait_for(lambda: status(platform, LENDER) is None, 90)
    assert broken(platform) == before
