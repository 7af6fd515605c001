"""Whatever a request asks for, it is answered in time, and no engine ends or stands still."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import HOT, Platform

pytestmark = pytest.mark.e2e
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": HOT, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "top_logprobs", "min_tokens",
)  # fmt: skip


def engines(platform: Platform) -> set[int]:
    return {
        process.pid
        for process in platform.process.children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    }


@pytest.fixture
def same_engines(platform: Platform) -> Iterator[None]:
    before = engines(platform)
    yield
    assert engines(platform) == before


def test_a_model_that_lacks_an_endpoint_says_which_it_has(platform: Platform) -> None:
    with platform.http() as http:
        response = http.post("/v1/embeddings", json={"model": HOT, "input": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "endpoint_not_found")
    assert CHAT in error["message"]


def test_what_is_beyond_a_bound_is_refused_by_the_gateway(platform: Platform) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {**BODY, "structured_outputs": {"json": deep}}, "structured_outputs"),
        (COMPLETIONS, {"model": HOT, "prompt": ["x"] * 1024, "n": 128}, "prompt"),
        (COMPLETIONS, {"model": HOT, "prompt": "word " * 10_000}, "prompt"),
        ("/v1/tokenize", {"model": HOT, "prompt": "word " * 10_000}, "prompt"),
    ]
    with platform.http() as http:
        for path, body, param in cases:
            response = http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        many = {"model": HOT, "prompt": ["x"] * 128, "max_tokens": 1}
        assert len(http.post(COMPLETIONS, json=many).json()["choices"]) == 128


@pytest.mark.usefixtures("same_engines")
def test_numbers_that_are_none_are_never_an_error_of_ours(platform: Platform) -> None:
    with platform.http() as http:
        for field in NUMBERS:
            for value in (b"NaN", b"-Infinity", b"-0", b"1" + b"0" * 400, b"1e400"):
                text = json.dumps({**BODY, "logprobs": True, field: "?"}).encode()
                response = http.post(CHAT, content=text.replace(b'"?"', value))
                refused = 400 if value in (b"NaN", b"-Infinity", b"1e400") else 499
                assert response.status_code in (200, *range(400, refused + 1)), (field, value)
        assert http.post(CHAT, json=BODY).status_code == 200
