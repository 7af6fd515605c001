from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.platform.engine.resumption.travelling import RESUMED, check_resumed, resumed_tokens

MODEL = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=20)


def request(tokens: Any, prompt: int = 5, max_tokens: int = 10, resumable: bool = False) -> Any:
    params = SimpleNamespace(extra_args={RESUMED: tokens, "other": 1}, max_tokens=max_tokens)
    return SimpleNamespace(
        sampling_params=params,
        prompt_token_ids=[1] * prompt,
        prompt_embeds=None,
        resumable=resumable,
    )


def test_tokens_so_far_are_read_from_a_requests_parameters() -> None:
    assert resumed_tokens(request([3, 4]).sampling_params) == [3, 4]
    assert resumed_tokens(SimpleNamespace(extra_args=None)) == []
    assert resumed_tokens(SimpleNamespace(extra_args={"other": 1})) == []
    assert resumed_tokens(None) == []


@pytest.mark.parametrize("tokens", [[], [0], [99] * 9])
def test_a_request_may_go_on_while_something_is_left(tokens: list[int]) -> None:
    check_resumed(request(tokens), MODEL)


def test_a_request_without_tokens_so_far_is_not_looked_at() -> None:
    check_resumed(SimpleNamespace(sampling_params=None), MODEL)
    check_resumed(SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)), MODEL)


@pytest.mark.parametrize("tokens", ["ab", 3, [100], [-1], [True], [1.0], [None], {"1": 1}])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of tokens, from 0 to 99"):
        check_resumed(request(tokens), MODEL)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(5, 4), (16, 10)])
def test_an_answer_that_is_whole_does_not_go_on(prompt: int, max_tokens: int) -> None:
    check_resumed(request([1] * 3, prompt, max_tokens), MODEL)
    with pytest.raises(ValueError, match="has 4 tokens, and the answer has at most 4"):
        check_resumed(request([1] * 4, prompt, max_tokens), MODEL)


def test_a_session_of_streamed_input_does_not_go_on() -> None:
    with pytest.raises(ValueError, match="streamed input"):
        check_resumed(request([1], resumable=True), MODEL)
