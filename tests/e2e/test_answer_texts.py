"""A prompt of tokens that ends in the midst of a character, on a real engine and across its end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_continuation import CONTINUED, kill_engine
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

SECRET = "Hello world, this is a secret prompt \U0001f30d\U0001f31f"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONG = 300


@pytest.fixture(scope="module")
def prompt(platform: Platform) -> list[int]:
    """Its tokens but for the last, which has the last bytes of the star."""
    with platform.http() as http:
        body = {"model": HOT, "prompt": SECRET, "add_special_tokens": False}
        tokens: list[int] = http.post("/v1/tokenize", json=body).json()["tokens"][:-1]
    assert text_of(platform, tokens).endswith(UNFINISHED)
    return tokens


def text_of(platform: Platform, tokens: list[int]) -> str:
    with platform.http() as http:
        body = {"model": HOT, "tokens": tokens}
        return str(http.post("/v1/detokenize", json=body).json()["prompt"])


def asked(prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": HOT, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {**body, "skip_special_tokens": False, "return_token_ids": True, **more}


def whole(platform: Platform, body: dict[str, Any]) -> list[dict[str, Any]]:
    with platform.http() as http:
        answer = http.post("/v1/completions", json=body, timeout=PATIENCE_S)
        choices: list[dict[str, Any]] = answer.raise_for_status().json()["choices"]
        return choices


def streamed(platform: Platform, body: dict[str, Any]) -> tuple[str, list[int]]:
    text, tokens = "", []
    with (
        platform.http() as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, tokens = text + choice["text"], tokens + choice["token_ids"]
    return text, tokens


def answer_in(platform: Platform, prompt: list[int], tokens: list[int]) -> str:
    """What of the text of all tokens is the answer's."""
    both, shown = text_of(platform, [*prompt, *tokens]), text_of(platform, prompt)
    before = shown if both.startswith(shown) else shown.rstrip(UNFINISHED)
    assert both.startswith(before)
    return both[len(before) :].rstrip(UNFINISHED)


@pytest.mark.parametrize("forced", [False, True])
def test_it_is_not_in_its_answer(platform: Platform, prompt: list[int], forced: bool) -> None:
    """``forced``: the answer's first token finishes the character."""
    with platform.http() as http:
        body = {"model": HOT, "prompt": SECRET, "add_special_tokens": False}
        (last,) = http.post("/v1/tokenize", json=body).json()["tokens"][-1:]
    more = {"logit_bias": {str(last): 100}, "max_tokens": 1} if forced else {}
    (plain,) = whole(platform, asked(prompt, logprobs=1, **more))
    assert "secret" not in plain["text"]
    assert plain["text"] == answer_in(platform, prompt, plain["token_ids"])
    assert (plain["text"] == "\U0001f31f") or not forced
    assert "".join(plain["logprobs"]["tokens"]).rstrip(UNFINISHED) == plain["text"]
    assert streamed(platform, asked(prompt, **more)) == (plain["text"], plain["token_ids"])
    several = whole(platform, asked(prompt, n=2, temperature=1, seed=7, **more))
    for choice in several:
        assert choice["text"] == answer_in(platform, prompt, choice["token_ids"])
    (echoed,) = whole(platform, asked(prompt, echo=True, return_token_ids=False, **more))
    both = text_of(platform, [*prompt, *plain["token_ids"]])
    assert echoed["text"] == both.rstrip(UNFINISHED)


def test_it_is_not_when_its_engine_is_killed(platform: Platform, prompt: list[int]) -> None:
    bodies = [asked([*prompt[:1], 1000 + n, *prompt[1:]], max_tokens=LONG) for n in range(4)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        undisturbed = [found for (found,) in pool.map(lambda each: whole(platform, each), bodies)]
    before = platform.metric(CONTINUED, model=HOT, reason="gone")
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(streamed, platform, body) for body in bodies]
        replicas = model_state(platform, HOT)["replicas"]
        wait_for(lambda: all(platform.in_flight(HOT, each["id"]) for each in replicas), 60)
        kill_engine(platform)
        told = [each.result() for each in answers]
    assert told == [(each["text"], each["token_ids"]) for each in undisturbed]
    assert platform.metric(CONTINUED, model=HOT, reason="gone") > before
    for body, (text, tokens) in zip(bodies, told, strict=True):
        assert text == answer_in(platform, body["prompt"], tokens)
