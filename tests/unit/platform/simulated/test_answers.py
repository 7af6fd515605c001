"""What simulated engines answer: the seed, the prompt and the place of a token decide it."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.models.simulated import WORDS
from loomserve.platform.simulated.answers import Answer, answer_to
from loomserve.platform.simulated.wire import FinishReason, WireRequest

EOS = 2
PROMPT = [5, 6, 7]


def request(name: str = "r", prompt: list[int] = PROMPT, **params: Any) -> WireRequest:
    given = {"temperature": 0, "max_tokens": 40, "_eos_token_id": EOS, **params}
    return WireRequest(name, prompt, None, given, None, 0.0, None, None)


def answered(*, seed: int = 0, longest: int = 1000, mean: int = 8, **what: Any) -> Answer:
    return answer_to(request(**what), seed=seed, mean_tokens=mean, longest=longest)


def test_the_same_prompt_has_the_same_answer_whatever_the_requests_id() -> None:
    assert answered(name="a") == answered(name="b")


@pytest.mark.parametrize("other", [{"seed": 1}, {"prompt": [5, 6, 8]}])
def test_another_seed_or_prompt_has_another(other: dict[str, Any]) -> None:
    assert answered(ignore_eos=True) != answered(ignore_eos=True, **other)


def test_an_adapter_has_answers_of_its_own() -> None:
    with_adapter = request(ignore_eos=True)
    with_adapter.lora_request = ["a", 1, "/a"]
    said = answer_to(with_adapter, seed=0, mean_tokens=8, longest=1000)
    assert said != answered(ignore_eos=True)


def test_who_draws_gets_another_answer_each_time() -> None:
    free = [answered(name=name, temperature=1.0, ignore_eos=True) for name in ("0_r", "1_r")]
    assert free[0] != free[1]


def of_sampling_seed(name: str, seed: int) -> Answer:
    given = request(name, temperature=1.0, ignore_eos=True)
    assert given.sampling_params is not None
    given.sampling_params["seed"] = seed
    return answer_to(given, seed=0, mean_tokens=8, longest=1000)


def test_a_requests_own_seed_decides() -> None:
    assert of_sampling_seed("a", 3) == of_sampling_seed("b", 3)
    assert of_sampling_seed("a", 3) != of_sampling_seed("a", 4)


def test_a_request_that_goes_on_elsewhere_has_the_answer_that_it_began() -> None:
    assert answered(name="r#2", temperature=1.0) == answered(name="r", temperature=1.0)


def test_answers_are_words_and_end_by_themselves() -> None:
    ends = [answered(prompt=[n]) for n in range(200)]
    assert {each.reason for each in ends} == {FinishReason.STOP}
    assert {each.tokens[-1] for each in ends} == {EOS}
    assert set().union(*(each.tokens[:-1] for each in ends)) <= set(WORDS)
    lengths = [len(each.tokens) - 1 for each in ends]
    assert set(lengths) == set(range(1, 16))


def test_max_tokens_and_the_context_end_an_answer() -> None:
    whole = answered(ignore_eos=True)
    assert (len(whole.tokens), whole.reason) == (40, FinishReason.LENGTH)
    for limits in ({"max_tokens": 5}, {"longest": 5}):
        short = answered(ignore_eos=True, **limits)
        assert short == Answer(whole.tokens[:5], FinishReason.LENGTH)


def test_min_tokens_hold_back_the_end_and_stop_tokens() -> None:
    most = answered(min_tokens=30)
    assert (len(most.tokens), most.tokens[-1]) == (31, EOS)
    stop = most.tokens[0]
    early = answered(min_tokens=30, stop_token_ids=[stop])
    assert len(early.tokens) >= 30


def test_a_stop_token_ends_an_answer_and_is_named() -> None:
    whole = answered(ignore_eos=True).tokens
    stopped = answered(ignore_eos=True, stop_token_ids=[whole[3]])
    at = whole.index(whole[3])
    assert stopped == Answer(whole[: at + 1], FinishReason.STOP, whole[3])


def test_only_allowed_tokens_are_given() -> None:
    assert set(answered(ignore_eos=True, allowed_token_ids=[8, 9]).tokens) == {8, 9}


def test_who_names_no_most_tokens_gets_sixteen_and_who_names_none_all_that_fit() -> None:
    given = WireRequest("r", PROMPT, None, {"ignore_eos": True}, None, 0.0, None, None)
    assert len(answer_to(given, seed=0, mean_tokens=8, longest=1000).tokens) == 16
    assert len(answered(max_tokens=None, ignore_eos=True).tokens) == 1000
