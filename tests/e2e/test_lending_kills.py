"""Streams of all kinds are the same when an engine is killed that borrows, or that lends.

The model has a replica on each core, and the one on core0 has requests' KV, or a head of each
layer, with a lender on core1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE, TOOLS, Platform, serving, started
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_continuation import BACK_S, CONTINUED, REQUESTS, answers, reach, running
from tests.e2e.test_failures import engine_process
from tests.e2e.test_lending import (
    BORROWER,
    COLD_MODEL,
    HOT_MODEL,
    LENDER,
    carry_out,
    get,
    loans,
    parts,
    plan_status,
    profile_devices,
)
from tests.streams import Answer, Asked, differences, mixture, with_stop_strings

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 120
CONTEXT = 100
TWO_BORROWERS = {
    **HOT_MODEL,
    "devices": ["core0", "core1"],
    "replicas": 2,
    "kv_cache_memory": "128MiB",
    "kvstore": True,
    "engine": {**ENGINE, **TOOLS},
    # Half of all requests start with the lender, however much memory there is.
    "lending": {**HOT_MODEL["lending"], "placement": "ratio", "lent_share": 0.5},
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with started(tmp_path_factory.mktemp("kills"), serving(COLD_MODEL, TWO_BORROWERS)) as running:
        profile_devices(running)
        yield running


@pytest.fixture(scope="module")
def asked(platform: Platform) -> list[Asked]:
    requests = mixture(BORROWER, REQUESTS, TOKENS, CONTEXT, 3)
    return with_stop_strings(requests, answers(platform, requests))


@pytest.fixture(scope="module")
def expected(platform: Platform, asked: list[Asked]) -> list[Answer]:
    """Undisturbed, and alike twice."""
    one, other = answers(platform, asked), answers(platform, asked)
    assert differences(one, other) == {}
    return one


def borrowing(platform: Platform) -> dict[str, Any]:
    """The replica that may borrow: the other has the lender's core."""
    replicas = model_state(platform, BORROWER)["replicas"]
    return next(dict(each) for each in replicas if each["device"] == "core0")


def lender(platform: Platform) -> dict[str, Any]:
    (replica,) = model_state(platform, LENDER)["replicas"]
    return dict(replica)


def heads_move(platform: Platform, **more: object) -> dict[str, Any]:
    ids = {"engine": borrowing(platform)["id"], "lender": lender(platform)["id"]}
    return {"action": "move", "kind": "heads", "amount": 1, **ids, **more}


def lent_requests(platform: Platform) -> bool:
    return any(loan["requests"] for loan in loans(platform))


def whole_without(platform: Platform, victim: dict[str, Any]) -> bool:
    """Whether all is as it was, with another replica in the victim's place."""
    models = [model_state(platform, name) for name in (BORROWER, LENDER)]
    ids = [each["id"] for model in models for each in model["replicas"]]
    ready = {model["status"] for model in models} == {"ready"}
    return ready and len(ids) == 3 and victim["id"] not in ids


@pytest.mark.parametrize("killed", [borrowing, lender])
def test_an_engine_is_killed_while_requests_are_with_a_lender(
    platform: Platform, asked: list[Asked], expected: list[Answer], killed: Any
) -> None:
    wait_for(lambda: any(loan["usable_blocks"] for loan in loans(platform)), 120)
    before = platform.metric(CONTINUED, model=BORROWER, reason="gone")
    with running(platform, asked) as load:
        reach(load, 10)
        wait_for(lambda: lent_requests(platform), 20)
        assert not load.ended.is_set(), "they ended before the kill"
        victim = killed(platform)
        engine_process(victim).kill()
    assert differences(expected, load.answers) == {}
    moved = platform.metric(CONTINUED, model=BORROWER, reason="gone") - before
    # Of a lender that ends, its borrowers' requests stay where they are.
    assert (moved > 0) == (killed is borrowing)
    wait_for(lambda: whole_without(platform, victim), BACK_S)
    wait_for(lambda: any(loan["usable_blocks"] for loan in loans(platform)), 120)
    with running(platform, asked) as load:
        wait_for(lambda: lent_requests(platform), 60)
    assert differences(expected, load.answers) == {}


@pytest.fixture
def away(platform: Platform) -> Iterator[Platform]:
    """With one head of each layer at the lender."""
    wait_for(lambda: any(loan["usable_blocks"] for loan in loans(platform)), 120)
    wait_for(lambda: not get(platform, "rebalancing")["flaws"], 120)
    plan = carry_out(platform, heads_move(platform))
    wait_for(lambda: parts(platform) == ["away"], 60)
    # One plan at a time, and this one is measured yet.
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)
    yield platform
    if parts(platform):
        plan = carry_out(platform, heads_move(platform, back=True))
        wait_for(lambda: not parts(platform), 60)
        wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)


@pytest.mark.parametrize("killed", [borrowing, lender])
def test_an_engine_is_killed_while_a_head_is_away(
    away: Platform, asked: list[Asked], expected: list[Answer], killed: Any
) -> None:
    with running(away, asked) as load:
        reach(load, 20)
        assert parts(away) == ["away"]
        victim = killed(away)
        engine_process(victim).kill()
    assert differences(expected, load.answers) == {}
    wait_for(lambda: whole_without(away, victim), BACK_S)
    if killed is borrowing:
        # Its place has the head away, whichever replica is there.
        wait_for(lambda: parts(away) == ["away"], 120)
    else:
        # A lender that ends has its borrower compute all itself, until a plan says otherwise.
        assert parts(away) == []
    assert differences(expected, answers(away, asked)) == {}
