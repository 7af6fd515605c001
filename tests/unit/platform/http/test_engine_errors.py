"""vLLM's error bodies in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from loomserve.platform.base.errors import MOST_CHARACTERS, BadRequest
from loomserve.platform.http.engine_errors import normalise


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (
            json.dumps(
                {"error": {"message": "This model's maximum context length is 8", "code": 400}}
            ).encode(),
            400,
            "context_length_exceeded",
            "This model's maximum context length is 8",
        ),
        (b'{"error": {"message": "bad n", "param": "n"}}', 400, "invalid_request", "bad n"),
        (b'{"message": "flat"}', 422, "invalid_request", "flat"),
        (b'{"detail": "Not Found"}', 404, "model_not_found", '{"detail": "Not Found"}'),
        (b"plain text", 400, "invalid_request", "plain text"),
        (b"", 400, "invalid_request", "the engine refused the request (400)"),
        (b'["list"]', 400, "invalid_request", '["list"]'),
    ],
)
def test_any_body_becomes_openais_error_object(
    body: bytes, status: int, code: str, message: str
) -> None:
    error = normalise(body, status)["error"]
    assert error["code"] == code
    assert error["message"] == message
    assert error["type"] == "invalid_request_error"


def test_the_parameter_is_kept() -> None:
    assert normalise(b'{"error": {"message": "x", "param": "n"}}', 400)["error"]["param"] == "n"


CHAT = ("model", "messages", "top_logprobs", "logprobs", "min_p", "response_format")


@pytest.mark.parametrize(
    ("message", "given", "fields", "param"),
    [
        ("min_p must be in [0, 1], got 2.0.", None, CHAT, "min_p"),
        ("Requested sample logprobs of 21", "logprobs", CHAT, "top_logprobs"),
        ("This model's maximum context length is 8", "input_text", CHAT, "messages"),
        ("m is not a multimodal model", None, CHAT, "messages"),
        ("Unsupported chat content part type: 'file'.", "type", CHAT, "messages"),
        ("Grammar error: Invalid type: zzz", None, CHAT, "response_format"),
        ("Invalid structural_tag specification.", "structured_outputs", ("tools",), "tools"),
        ("max_tokens must be at least 1", "max_tokens", ("max_output_tokens",),
         "max_output_tokens"),
        ("Token id 9 is out of vocabulary", None, ("prompt",), "prompt"),
        ("The model is busy with other users", None, ("model", "user"), None),
        ("wrong", "tool_choice.function.name", ("tool_choice",), "tool_choice.function.name"),
    ],
)  # fmt: skip
def test_the_parameter_is_a_field_that_the_request_has(
    message: str, given: str | None, fields: tuple[str, ...], param: str | None
) -> None:
    body = json.dumps({"error": {"message": message, "param": given, "code": 400}}).encode()
    assert normalise(body, 400, fields)["error"]["param"] == param


def test_what_is_missing_is_told_by_the_platforms_own_errors() -> None:
    body = json.dumps(BadRequest("max_tokens: Field required", param="max_tokens").body()).encode()
    assert normalise(body, 400, ("model",))["error"]["param"] == "max_tokens"


def test_what_vllm_repeats_of_an_error_behind_it_is_left_out() -> None:
    body = b'{"error": {"message": "n is wrong (parameter=n, value=(3))", "code": 400}}'
    assert normalise(body, 400)["error"]["message"] == "n is wrong"
    assert len(BadRequest("x" * 10**6).message) == MOST_CHARACTERS
