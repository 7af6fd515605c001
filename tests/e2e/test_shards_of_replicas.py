"""Parts of a decode replica go to the prefill replica of its model, and come home."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE, Platform, serving, started
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_lending import (
    answer,
    asking,
    carry_out,
    loans,
    parts,
    plan_status,
    post,
    profile_devices,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

APART = "apart"
MODEL = {
    "name": APART,
    "source": "demo",
    "devices": ["core0", "core1"],
    "replicas": 2,
    "kv_cache_memory": "256MiB",
    "engine": ENGINE,
    "roles": {"prefill": 1, "decode": 1, "local_prompt_tokens": 32},
    "lending": {
        "lend_memory": "192MiB",
        "borrow_memory": "192MiB",
        "patience_ms": 3000,
        # Parts that came home for the prefill replica's sake would show nothing.
        "tpot_budget": 5,
    },
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Of one model, which prefills on one core and decodes on the other."""
    with started(tmp_path_factory.mktemp("apart"), serving(MODEL)) as running:
        profile_devices(running)
        wait_for(lambda: handed_over(running, "Is there anybody? " * 10), 60)
        yield running


def handed_over(platform: Platform, prompt: str) -> bool:
    before = handoffs(platform)
    answer(platform, prompt, APART)
    return handoffs(platform) > before


def handoffs(platform: Platform) -> float:
    return platform.metric("loomserve_handoffs_total", model=APART, outcome="continued")


def from_store(platform: Platform) -> float:
    return platform.metric("loomserve_handoff_tokens_total", model=APART, source="store")


def tales(kind: str) -> list[str]:
    return [f"{kind} tale {at}. " + "Once upon a time there was a fox. " * 12 for at in range(6)]


def a_move(platform: Platform, **of: object) -> dict[str, Any]:
    """From the decode replica to the other."""
    of_role = {each["role"]: each["id"] for each in model_state(platform, APART)["replicas"]}
    return {"action": "move", "engine": of_role["decode"], "lender": of_role["prefill"], **of}


def test_replicas_borrow_nothing_of_one_another_by_themselves(platform: Platform) -> None:
    assert not loans(platform)
    refused = post(platform, "plans", {"actions": [a_move(platform, kind="requests", amount=1)],
                                    "force": True})  # fmt: skip
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "not_movable"


@pytest.mark.parametrize(("kind", "amount"), [("heads", 2), ("layers", 10)])
def test_a_part_goes_to_the_prefill_replica_and_home_while_prompts_are_handed_over(
    platform: Platform, kind: str, amount: int
) -> None:
    before, meanwhile = tales("An old"), tales("A new")
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda each: answer(platform, each, APART), before))
    with asking(platform, before, APART) as answers:
        plan = carry_out(platform, a_move(platform, kind=kind, amount=amount))
        assert answers() == expected
    wait_for(lambda: parts(platform) == ["away"], 60)
    (loan,) = loans(platform)
    assert (loan["borrower"], loan["lender"]) == (APART, APART)
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)
    told = handoffs(platform), from_store(platform)
    with asking(platform, meanwhile, APART) as answers:
        found = answers()
    assert parts(platform) == ["away"]
    wait_for(lambda: handoffs(platform) == told[0] + len(meanwhile), 10)
    # At least the full blocks of each prompt came through the store, to both replicas.
    assert from_store(platform) - told[1] >= len(meanwhile) * 64
    with asking(platform, before, APART) as answers:
        plan = carry_out(platform, a_move(platform, kind=kind, amount=amount, back=True))
        assert answers() == expected
    wait_for(lambda: not parts(platform), 60)
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)
    with asking(platform, meanwhile, APART) as answers:
        assert answers() == found
