"""A platform on simulated engines: what its models answer, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform, stream
from tests.e2e.test_admin import model_state, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]


def test_each_replica_gives_the_same_words_and_another_prompt_others(platform: Platform) -> None:
    first, second = model_state(platform, HOT)["replicas"]
    texts = []
    with platform.admin() as admin:
        for drained in (first, second):
            path = f"/admin/v1/replicas/{drained['id']}/draining"
            admin.put(path, json={"draining": True}).raise_for_status()
            texts.append(stream(platform, HOT, "Once upon a time", 30))
            admin.put(path, json={"draining": False}).raise_for_status()
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 30
    assert stream(platform, HOT, "Once upon another", 30) != texts[0]


def test_sampled_answers_differ_unless_they_have_a_seed(platform: Platform) -> None:
    def sampled(**how: Any) -> list[str]:
        answer = platform.client().completions.create(
            model=COLD, prompt="Once", max_tokens=20, extra_body={"ignore_eos": True}, n=3, **how
        )
        return [each.text for each in answer.choices]

    assert len({*sampled(), *sampled()}) == 6
    assert len(set(sampled(seed=7))) == 3
    assert sampled(seed=7) == sampled(seed=7) != sampled(seed=8)


def test_an_engine_that_is_killed_changes_no_word_of_its_streams(platform: Platform) -> None:
    prompts = [f"Tale {number}. Once upon a time" for number in range(4)]
    alone = [stream(platform, HOT, prompt, 120) for prompt in prompts]
    before = platform.metric("loomserve_continued_requests_total", model=HOT)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(stream, platform, HOT, prompt, 120) for prompt in prompts]
        replicas = model_state(platform, HOT)["replicas"]
        wait_for(lambda: all(platform.in_flight(HOT, each["id"]) for each in replicas), 30)
        psutil.Process(replicas[0]["engine_pid"]).kill()
        assert [each.result() for each in answers] == alone
    assert platform.metric("loomserve_continued_requests_total", model=HOT) > before


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"response_format": {"type": "json_object"}}, "follow a grammar"),
        ({"logit_bias": {"300": 5}}, "logit_bias"),
        ({"extra_body": {"prompt_logprobs": 1}}, "log probabilities of a prompt"),
    ],
)
def test_what_takes_a_model_is_refused(platform: Platform, asked: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match="simulated and cannot") as refused:
        platform.client().chat.completions.create(
            model=HOT, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, **asked
        )
    assert says in refused.value.message
