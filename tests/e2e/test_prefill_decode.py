"""Prefill and decode on replicas of their own, and roles that change while requests run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_kvstore import store_answers, store_process
from tests.e2e.traced import Traced, events, told
from tests.unit.platform.tracing.collector import Collector
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

TOKENS_A_BLOCK = 32


@pytest.fixture(scope="module")
def separated(platform: Platform) -> Iterator[Platform]:
    """The hot model's replica on core0 prefills, that on core1 decodes."""
    set_roles(platform, core0="prefill", core1="decode")

    def handed_over() -> bool:
        before = handoffs(platform, "continued")
        ask(platform, new_prompt(), max_tokens=2)
        return handoffs(platform, "continued") > before

    # On a busy machine reports and routing statistics take their time to go round.
    wait_for(handed_over, 60)
    yield platform
    set_roles(platform, core0="unified", core1="unified")


def set_roles(platform: Platform, **roles: str) -> None:
    replicas = model_state(platform, HOT)["replicas"]
    with platform.admin() as admin:
        for replica in replicas:
            path = f"/admin/v1/replicas/{replica['id']}/role"
            admin.put(path, json={"role": roles[replica["device"]]}).raise_for_status()
    time.sleep(5)  # reports and routing statistics must have gone round


def new_prompt(words: int = 60) -> str:
    return f"{uuid.uuid4().hex} " + "Once upon a time there was a fox. " * (words // 4)


def ask(platform: Platform, prompt: str, **options: Any) -> Any:
    body = {"ignore_eos": True, **options.pop("extra_body", {})}
    return platform.client().completions.create(
        **{
            "model": HOT,
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "extra_body": body,
            **options,
        }
    )


def alone(platform: Platform, prompt: str, **options: Any) -> Any:
    """The same weights on a unified replica, which finds nothing of the prompt in the store."""
    body = {"cache_salt": uuid.uuid4().hex, **options.pop("extra_body", {})}
    return ask(platform, prompt, model=COLD, extra_body=body, **options)


def handoffs(platform: Platform, outcome: str) -> float:
    return platform.metric("loomserve_handoffs_total", model=HOT, outcome=outcome)


@contextmanager
def hands_over(platform: Platform, outcome: str, times: int = 1) -> Iterator[None]:
    before = handoffs(platform, outcome)
    yield
    wait_for(lambda: handoffs(platform, outcome) == before + times, 10)


@pytest.mark.claim("prefill and decode")
def test_an_answer_is_the_same_whoever_computes_its_prompt(separated: Platform) -> None:
    prompt = new_prompt()
    before = separated.metric("loomserve_handoff_tokens_total", model=HOT, source="store")
    with hands_over(separated, "continued"):
        apart = ask(separated, prompt)
    after = separated.metric("loomserve_handoff_tokens_total", model=HOT, source="store")
    assert after - before >= (apart.usage.prompt_tokens // TOKENS_A_BLOCK) * TOKENS_A_BLOCK - 1
    by_one = alone(separated, prompt)
    assert apart.choices[0].text == by_one.choices[0].text
    assert apart.usage.prompt_tokens == by_one.usage.prompt_tokens
    assert apart.usage.completion_tokens == 12
    assert apart.choices[0].finish_reason == "length"


def test_a_trace_tells_who_computed_the_prompt_and_who_answered(
    separated: Platform, collector: Collector
) -> None:
    trace = Traced()
    with hands_over(separated, "continued"):
        usage = ask(separated, new_prompt(), extra_headers=trace.headers).usage
    replicas = {one["device"]: one["id"] for one in model_state(separated, HOT)["replicas"]}
    # vLLM's own is of the whole answer, not of each part.
    names = ("POST /v1/completions", "prefill", "decode", "llm_request")
    spans = trace.spans(collector, *names)
    prefill, decode = (each for each in spans if each.name in ("prefill", "decode"))
    for span, device, left in ((prefill, "core0", "handed_over"), (decode, "core1", "finished")):
        assert (told(span)["replica"], told(span)["left"]) == (replicas[device], left)
    assert told(decode)["tokens"] == usage.completion_tokens
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano
    (handed,) = [what for name, what in events(spans[0]) if name == "hand_off"]
    assert (handed["from"], handed["to"]) == (replicas["core0"], replicas["core1"])


def test_one_stream_carries_the_first_token_and_all_others_once(separated: Platform) -> None:
    prompt = new_prompt()
    with hands_over(separated, "continued"):
        chunks = [
            chunk.choices[0]
            for chunk in ask(separated, prompt, stream=True, logprobs=0)
            if chunk.choices
        ]
    whole = alone(separated, prompt, logprobs=0).choices[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert tokens == whole.logprobs.tokens
    logprobs = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
    assert logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"seed": 5, "temperature": 1.0},
        {"extra_body": {"structured_outputs": {"regex": "[0-9]{12}"}, "ignore_eos": False}},
    ],
    ids=["penalties", "seed", "grammar"],
)
def test_sampling_that_looks_back_sees_the_first_token_as_its_own(
    separated: Platform, options: dict[str, Any]
) -> None:
    prompt = new_prompt()
    with hands_over(separated, "continued"):
        apart = ask(separated, prompt, **options)
    assert apart.choices[0].text == alone(separated, prompt, **options).choices[0].text


def test_a_deadline_does_not_change_how_a_request_is_handed_over(separated: Platform) -> None:
    prompt = new_prompt()
    with hands_over(separated, "continued"):
        apart = ask(separated, prompt, extra_headers={"x-slo-ms": "60000"})
    assert apart.choices[0].text == alone(separated, prompt).choices[0].text


def test_an_answer_may_end_with_its_first_token(separated: Platform) -> None:
    prompt = new_prompt()
    first = alone(separated, prompt, max_tokens=1).choices[0].text
    with hands_over(separated, "continued", 3):
        one = ask(separated, prompt, max_tokens=1)
        stopped = ask(separated, prompt, stop=[first])
        streamed = list(ask(separated, prompt, stop=[first], stream=True))
    assert (one.choices[0].text, one.choices[0].finish_reason) == (first, "length")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_several_answers_to_one_prompt_are_all_whole(separated: Platform) -> None:
    answer = ask(separated, new_prompt(), n=3, temperature=0.8)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert answer.usage.completion_tokens == 36


def test_a_short_prompt_stays_where_it_is_decoded(separated: Platform) -> None:
    with hands_over(separated, "local"):
        assert ask(separated, "Once").choices[0].text


def test_a_client_that_leaves_during_prefill_leaves_nothing_behind(separated: Platform) -> None:
    def idle() -> bool:
        replicas = model_state(separated, HOT)["replicas"]
        return all(r["in_flight"] == 0 and r["load"]["running"] == 0 for r in replicas)

    with separated.client().with_options(timeout=0.15) as hasty:
        for _ in range(3):
            with pytest.raises(Exception, match="timed out"):
                hasty.completions.create(model=HOT, prompt=new_prompt(350), max_tokens=50)
    wait_for(idle, 20)
    assert ask(separated, new_prompt()).choices[0].text


def test_roles_change_while_requests_run_and_none_is_lost(separated: Platform) -> None:
    prompt = new_prompt()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    ]
    expected = [alone(separated, prompt, max_tokens=40, **kind).choices[0].text for kind in kinds]

    def one(number: int) -> str:
        time.sleep(number * 0.4)
        # Each computes the prompt anew.
        salt = {"cache_salt": uuid.uuid4().hex}
        answer = ask(separated, prompt, max_tokens=40, extra_body=salt, **kinds[number % 3])
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(24) as pool:
        running = pool.map(one, range(24))
        set_roles(separated, core0="decode", core1="prefill")
        set_roles(separated, core0="prefill", core1="decode")
        assert list(running) == expected * 8


@pytest.mark.slow
def test_without_prefill_or_without_decode_replicas_the_others_do_the_whole_work(
    separated: Platform,
) -> None:
    prompt = new_prompt()
    expected = alone(separated, prompt).choices[0].text
    try:
        set_roles(separated, core0="decode", core1="decode")
        with hands_over(separated, "prefill_away"):
            assert ask(separated, prompt).choices[0].text == expected
        set_roles(separated, core0="prefill", core1="prefill")
        assert ask(separated, new_prompt()).choices[0].text
    finally:
        set_roles(separated, core0="prefill", core1="decode")


def test_a_store_that_is_away_or_hangs_costs_time_and_no_answer(separated: Platform) -> None:
    prompt = new_prompt()
    expected = alone(separated, prompt).choices[0].text
    store = store_process(separated)
    store.suspend()
    try:
        began = time.monotonic()
        assert ask(separated, prompt).choices[0].text == expected
        assert time.monotonic() - began < PATIENCE_S
    finally:
        store.resume()
    wait_for(lambda: store_answers(separated), 30)


@pytest.mark.slow
def test_a_killed_prefill_replica_loses_no_request(separated: Platform) -> None:
    replicas = model_state(separated, HOT)["replicas"]
    prefill = next(r for r in replicas if r["role"] == "prefill")
    prompts = [new_prompt(200) for _ in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(ask, separated, prompt) for prompt in prompts]
        time.sleep(0.3)
        psutil.Process(prefill["engine_pid"]).kill()
        answers = [one.result() for one in running]
    assert all(answer.usage.completion_tokens == 12 for answer in answers)
    wait_for(lambda: len(model_state(separated, HOT)["replicas"]) == 2, 120)
    roles = {r["device"]: r["role"] for r in model_state(separated, HOT)["replicas"]}
    assert roles == {"core0": "prefill", "core1": "decode"}


def test_roles_need_a_known_replica_and_a_known_name(separated: Platform) -> None:
    replica = model_state(separated, HOT)["replicas"][0]["id"]
    with separated.admin() as admin:
        unknown = admin.put("/admin/v1/replicas/none/role", json={"role": "decode"})
        assert unknown.status_code == 404
        wrong = admin.put(f"/admin/v1/replicas/{replica}/role", json={"role": "both"})
        assert wrong.status_code == 400
        assert "prefill" in wrong.json()["error"]["message"]
