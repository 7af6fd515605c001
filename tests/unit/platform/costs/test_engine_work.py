"""What an engine's device works on, against an engine whose steps are made up of known parts."""

from __future__ import annotations

import random

import pytest

from loomserve.platform.costs.engine_work import EngineWork

CONSTANT_S, REQUEST_S, KV_S, TOKEN_S = 0.010, 0.0005, 0.040, 0.0002


def step_s(generated: int, kv_usage: float, computed: int = 0) -> float:
    decoding = CONSTANT_S + REQUEST_S * generated + KV_S * kv_usage if generated else 0.0
    return decoding + TOKEN_S * computed


def worked(steps: int, prompts: bool) -> tuple[EngineWork, float, float]:
    """With the attention and the prompts that there really were."""
    work, chance = EngineWork(), random.Random(0)
    attention_s = prefill_s = 0.0
    for at in range(steps):
        generated, kv_usage = chance.randint(1, 16), chance.random()
        computed = 400 if prompts and at % 4 == 3 else 0
        seconds = step_s(generated, kv_usage, computed) * chance.uniform(0.97, 1.03)
        work.step(
            seconds, running=generated, generated=generated, computed=computed, kv_usage=kv_usage
        )
        attention_s += KV_S * kv_usage
        prefill_s += TOKEN_S * computed
    return work, attention_s, prefill_s


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_and_attention_are_told_from_the_rest(prompts: bool) -> None:
    work, attention_s, prefill_s = worked(3000, prompts)
    assert work.attention_s == pytest.approx(attention_s, rel=0.1)
    assert work.prefill_s == pytest.approx(prefill_s, rel=0.1, abs=0.5)


def test_all_time_is_somebodys() -> None:
    work, total = EngineWork(), 0.0
    for at in range(500):
        generated = at % 7
        seconds = 0.01 + 0.001 * (at % 13)
        work.step(
            seconds,
            running=at % 9,
            generated=generated,
            computed=64 * (at % 5 == 0),
            kv_usage=at % 11 / 11,
        )
        total += seconds
        assert work.prefill_s + work.attention_s + work.linear_s == pytest.approx(total)
        assert min(work.prefill_s, work.attention_s, work.linear_s) >= 0


def test_steps_of_a_long_prompt_are_its_own_before_it_has_a_token() -> None:
    work = EngineWork()
    for _ in range(4):
        work.step(0.2, running=1, generated=0, computed=0, kv_usage=0.3)
    assert (work.prefill_s, work.linear_s) == (pytest.approx(0.8), 0)


def test_tokens_count_those_of_prompts_and_answers() -> None:
    work = EngineWork()
    work.step(0.1, running=2, generated=2, computed=30, kv_usage=0.1)
    work.step(0.1, running=2, generated=2, computed=0, kv_usage=0.1)
    assert work.tokens == 34


def decoded(work: EngineWork, generated: int, kv_usage: float) -> float:
    """Share of the time that is somebody's, of steps that only decode, once they are known."""
    begin = work.attention_s + work.linear_s
    for _ in range(100):
        seconds = step_s(generated, kv_usage)
        work.step(
            seconds, running=generated, generated=generated, computed=0, kv_usage=kv_usage
        )  # fmt: skip
    return (work.attention_s + work.linear_s - begin) / (100 * seconds)


def test_a_gpus_step_of_few_requests_leaves_what_more_of_them_would_share() -> None:
    of = {"gpu": EngineWork(most_running=64), "core": EngineWork()}
    for work in of.values():
        chance = random.Random(0)
        for _ in range(2000):
            generated, kv_usage = chance.randint(1, 64), chance.random()
            seconds = step_s(generated, kv_usage)
            work.step(
                seconds, running=generated, generated=generated, computed=0, kv_usage=kv_usage
            )
    assert decoded(of["core"], 2, 0.02) == pytest.approx(1)
    # A constant of 10 ms, and 1.8 for two requests, which have a 32nd of the places.
    assert decoded(of["gpu"], 2, 0.02) == pytest.approx((10 / 32 + 1.8) / 11.8, rel=0.1)
    # All places are taken, or all memory is.
    assert decoded(of["gpu"], 64, 0.5) == pytest.approx(1, abs=0.02)
    assert decoded(of["gpu"], 16, 1.0) == pytest.approx(1, abs=0.02)
