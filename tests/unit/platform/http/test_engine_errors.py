"""vLLM's error bodies in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

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
