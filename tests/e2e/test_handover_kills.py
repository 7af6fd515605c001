"""Streams of all kinds are the same when the engine that computes prompts is killed, or the other.

The hot model's replica on core0 prefills, that on core1 decodes.
"""

from __future__ import annotations

import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_continuation import (
    BACK_S,
    CONTINUED,
    REQUESTS,
    answers,
    back_without,
    running,
)
from tests.e2e.test_failures import engine_process
from tests.e2e.test_prefill_decode import ask, handoffs, new_prompt, separated
from tests.streams import Answer, Asked, Load, differences, mixture, with_stop_strings
from tests.waiting import within

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

__all__ = ["separated"]

TOKENS = 60
CONTEXT = 300
SEQUENCES = REQUESTS + 1
"""One of the requests asks for two answers."""


@pytest.fixture(scope="module")
def asked(separated: Platform) -> list[Asked]:
    requests = mixture(HOT, REQUESTS, TOKENS, CONTEXT, 4)
    return with_stop_strings(requests, answers(separated, requests))


@pytest.fixture(scope="module")
def expected(separated: Platform, asked: list[Asked]) -> list[Answer]:
    """Undisturbed, alike twice, and each handed over."""
    one = answers(separated, asked)
    before = handoffs(separated, "continued")
    assert differences(one, answers(separated, asked)) == {}
    assert handoffs(separated, "continued") == before + SEQUENCES
    return one


def first_tokens(load: Load) -> int:
    """Streams that have a token, and so have been handed over, or are being."""
    return sum(bool(one.choices) for one in load.answers)


def hands_over(platform: Platform) -> bool:
    """Whether the next prompt is computed by one replica and answered by the other."""
    before = handoffs(platform, "continued")
    ask(platform, new_prompt(), max_tokens=2)
    return handoffs(platform, "continued") > before


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["while prompts are computed", "while prompts are handed over"])
def test_an_engine_is_killed(
    separated: Platform, asked: list[Asked], expected: list[Answer], when: str, role: str
) -> None:
    wait_for(lambda: hands_over(separated), 60)
    before = separated.metric(CONTINUED, model=HOT, reason="gone")
    replicas = {one["role"]: one for one in model_state(separated, HOT)["replicas"]}
    victim = replicas[role]
    engine = engine_process(victim)
    with running(separated, asked) as load:
        if when == "while prompts are computed":
            within(60, lambda: bool(separated.in_flight(HOT, replicas["prefill"]["id"])))
            assert first_tokens(load) < REQUESTS
        else:
            within(60, lambda: 2 <= first_tokens(load) < REQUESTS)
        engine.kill()
    assert differences(expected, load.answers) == {}
    if role == "prefill" or when == "while prompts are handed over":
        assert separated.metric(CONTINUED, model=HOT, reason="gone") > before
    wait_for(lambda: back_without(separated, victim["id"]), BACK_S)
    roles = {one["device"]: one["role"] for one in model_state(separated, HOT)["replicas"]}
    assert roles == {"core0": "prefill", "core1": "decode"}
    wait_for(lambda: hands_over(separated), 60)
    assert differences(expected, answers(separated, asked)) == {}
