"""Entries of fields, lengths of what is searched for, and log probabilities are bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.client_body import SMALL_BYTES
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.policy.logprobs import MOST_AT_ONCE, most_tokens

COMPLETIONS = "/v1/completions"
TOO_MUCH: list[tuple[str, Any]] = [
    ("bad_words", ["x"] * 129),
    ("bad_words", ["x" * 65]),
    ("bad_words", "x" * 490_000),
    ("stop", ["x"] * 1025),
    ("stop", "x" * 1025),
    ("stop", ["a", "x" * 1025]),
    ("stop_sequences", ["x" * 1025]),
    ("stop_token_ids", [1] * 1025),
    ("stop_token_ids", [{}] * 100_000),
    ("logit_bias", {str(number): 1 for number in range(1025)}),
    ("logprob_token_ids", [1] * 1025),
    ("include", [{}] * 60_000),
    ("vllm_xargs", {"a": [1] * 1025}),
    ("unknown", [[]] * 1025),
    ("logprobs", -1),
    ("logprobs", 10_000),
    ("top_logprobs", 4096),
    ("prompt_logprobs", -1),
    ("top_k", 2**70),
    ("kv_transfer_params", {"a": 1}),
]


def check(body: bytes, path: str = COMPLETIONS) -> None:
    request = EngineRequest.of(path, body)
    request.check_sequences(128)
    request.check_conversation(())


@pytest.mark.parametrize(("field", "value"), TOO_MUCH, ids=lambda value: str(value)[:20])
def test_too_much_is_refused_however_the_body_is_written(field: str, value: Any) -> None:
    small = json.dumps({"model": "m", field: value})
    spaces = " " * SMALL_BYTES
    sound = json.dumps({"model": "m", field: None})[:-1]
    bodies = {
        "as it is": small,
        "spaces behind": small + spaces,
        "spaces before": spaces + small,
        "spaces within": small[:-1] + spaces + "}",
        "a long text": small[:-1] + f', "prompt": "{"x" * SMALL_BYTES}"}}',
        "a long text first": f'{{"prompt": "{"x" * SMALL_BYTES}", ' + small[1:],
        "given twice": sound + ", " + small[1:],
        "given twice in a large body": f'{{"prompt": "{"x" * SMALL_BYTES}", '
        + sound[1:] + ", " + small[1:],
        "its name escaped": small.replace(f'"{field}"', f'"\\u{ord(field[0]):04x}{field[1:]}"'),
        "its name escaped in a large body": f'{{"prompt": "{"x" * SMALL_BYTES}", '
        + small[1:].replace(f'"{field}"', f'"\\u{ord(field[0]):04x}{field[1:]}"'),
    }  # fmt: skip
    for name, body in bodies.items():
        with pytest.raises(BadRequest) as refused:
            check(body.encode())
        # Or there is too much of it to be looked at.
        assert refused.value.param == field or "bytes long" in refused.value.message, name


def test_what_is_usual_passes() -> None:
    fields = {
        "stop": ["a", "b"], "bad_words": ["word"] * 128, "logit_bias": {"1": 1.0},
        "stop_token_ids": [1] * 1024, "allowed_token_ids": list(range(50_000)), "logprobs": 20,
        "max_tokens": 500, "n": 3, "echo": True, "prompt_logprobs": 20, "prompt": [1] * 100_000,
    }  # fmt: skip
    check(json.dumps({"model": "m", **fields}).encode())


def test_a_body_of_many_fields_is_refused() -> None:
    with pytest.raises(BadRequest, match="fields"):
        check(json.dumps({f"k{number}": 0 for number in range(257)}).encode())


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 1560}, True),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 1561}, False),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 8000, "stream": True}, True),
        ({"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 8}, True),
        ({"logprobs": True, "top_logprobs": 20, "n": 128, "max_completion_tokens": 16}, False),
        ({"logprobs": True, "top_logprobs": 40, "n": 128, "stream": True}, False),
        ({"logprobs": True, "max_tokens": 32_768}, True),
        ({"logprobs": 5, "prompt": ["x"] * 100, "max_tokens": 16}, True),
        ({"logprobs": 5, "prompt": ["x"] * 100, "max_tokens": 100}, False),
        ({"logprobs": True, "logprob_token_ids": [1] * 1000, "max_tokens": 30}, True),
        ({"logprobs": True, "logprob_token_ids": [1] * 1000, "max_tokens": 300}, False),
        ({"input": "x", "top_logprobs": 20, "max_output_tokens": 1560}, True),
        ({"input": "x", "top_logprobs": 20, "max_output_tokens": 1561}, False),
        # Its last events say all of them again.
        ({"input": "x", "top_logprobs": 20, "max_output_tokens": 390, "stream": True}, True),
        ({"input": "x", "top_logprobs": 20, "max_output_tokens": 391, "stream": True}, False),
    ],
)
def test_log_probabilities_times_answers_times_tokens(fields: Any, passes: bool) -> None:
    asked: Any = {"prompt": "x"}
    path = "/v1/responses" if "input" in fields else COMPLETIONS
    if fields.get("logprobs") is True:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    elif "input" in fields:
        asked = {"include": ["message.output_text.logprobs"]}
    body = json.dumps({"model": "m", **asked, **fields}).encode()
    if passes:
        check(body, path)
    else:
        with pytest.raises(BadRequest, match="log probabilities"):
            check(body, path)


def test_an_answer_without_a_length_gets_one_that_others_can_wait_for() -> None:
    assert most_tokens(0, 1) == MOST_AT_ONCE
    assert most_tokens(20, 2) * 21 * 2 <= MOST_AT_ONCE
    assert most_tokens(-1, 1) == 1
