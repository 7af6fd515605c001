"""Whatever a client gets wrong is its own 4xx in OpenAI's shape: no 5xx, no hang, no traceback."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.waiting import fastest

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def assert_openai_error(response: httpx.Response, status: int, *parts: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert "Traceback" not in response.text
    for part in parts:
        assert part in error["message"], error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "not valid JSON"),
        (b"", "the body is empty"),
        (b"[1, 2]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"model": "\xff\xfe"}', "UTF-8"),
        (b"[" * 100_000, ""),
    ],
)
def test_a_body_that_is_not_an_object_is_refused(
    platform: Platform, body: bytes, part: str
) -> None:
    with platform.http() as http:
        assert_openai_error(http.post(CHAT, content=body), 400, part)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": "hello"},
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": 7}]},
        {"messages": [7]},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"max_tokens": 10**9},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 7},
        {"n": 0},
        {"n": 1000},
        {"stream": "perhaps"},
        {"stop": 5},
        {"logprobs": True, "top_logprobs": 1000},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
        {"tool_choice": "required", "tools": [{"type": "function"}]},
        {"model": 5},
        {"model": None},
        {"model": ""},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_a_wrong_field_is_refused(platform: Platform, change: dict[str, Any]) -> None:
    with platform.http() as http:
        response = http.post(CHAT, json={"model": HOT, "messages": HELLO, "max_tokens": 4} | change)
    assert_openai_error(response, 400)


def test_unknown_fields_are_ignored_as_vllm_ignores_them(platform: Platform) -> None:
    with platform.http() as http:
        body = {"model": HOT, "messages": HELLO, "max_tokens": 2, "colour": "red"}
        assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "part"),
    [
        (CHAT, {"guided_choice": ["red", "green"]}, "structured_outputs.choice"),
        (CHAT, {"functions": [{"name": "f"}]}, "tools"),
        (CHAT, {"best_of": 3}, "n asks"),
        (CHAT, {"n": "+16"}, "whole number"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "whole conversation"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "describe a function"),
        ("/v1/responses", {"max_tokens": 4}, "max_output_tokens"),
        ("/v1/messages", {"stop": ["a"]}, "stop_sequences"),
    ],
)
def test_what_would_not_be_obeyed_is_refused(
    platform: Platform, path: str, change: dict[str, Any], part: str
) -> None:
    asked = {"input": "hello"} if path == "/v1/responses" else {"messages": HELLO, "max_tokens": 4}
    with platform.http() as http:
        response = http.post(path, json={"model": HOT, **asked, **change})
    if path == "/v1/messages":  # which has a shape of its own
        assert (response.status_code, response.json()["type"]) == (400, "error")
        assert part in response.json()["error"]["message"]
        return
    assert_openai_error(response, 400, part)


def test_an_unknown_model_is_answered_with_the_models_there_are(platform: Platform) -> None:
    with platform.http() as http:
        response = http.post(CHAT, json={"model": "gpt-9", "messages": HELLO})
    assert_openai_error(response, 404, "gpt-9", HOT, COLD)
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_over_the_context_states_both_lengths(platform: Platform) -> None:
    with platform.http() as http:
        response = http.post("/v1/completions", json={"model": HOT, "prompt": [5] * 1500})
    assert_openai_error(response, 400, "1024", "1500")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_of_ten_megabytes_is_refused(platform: Platform) -> None:
    with platform.http() as http:
        response = http.post(CHAT, content=b'{"a":"' + b"x" * 10_000_000 + b'"}')
    assert_openai_error(response, 413, "1048576")


@pytest.mark.parametrize("value", ["soon", "-5", "0", "nan"])
def test_a_deadline_that_is_no_time_is_refused(platform: Platform, value: str) -> None:
    with platform.http() as http:
        response = http.post(
            CHAT, json={"model": HOT, "messages": HELLO}, headers={"x-slo-ms": value}
        )
    assert_openai_error(response, 400)
    assert response.json()["error"]["param"] == "x-slo-ms"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_deadline_is_set_with_the_header_only(platform: Platform, path: str) -> None:
    body = {"model": HOT, "max_tokens": 2, "vllm_xargs": {"loomserve_deadline": 1e12}}
    with platform.http() as http:
        response = http.post(path, json=body)
    if path == "/v1/messages":
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert "x-slo-ms" in error["message"]
        return
    assert_openai_error(response, 400, "x-slo-ms")
    assert response.json()["error"]["param"] == "loomserve_deadline"


def test_paths_and_methods_that_are_not_there_are_answered_in_shape(platform: Platform) -> None:
    with platform.http() as http:
        assert_openai_error(http.get("/v1/nothing"), 404)
        assert_openai_error(http.get(CHAT), 405)


def test_keys_are_needed_and_checked(platform: Platform) -> None:
    body = {"model": HOT, "messages": HELLO, "max_tokens": 2}
    assert_openai_error(httpx.post(platform.url + CHAT, json=body), 401)
    with platform.http("lsk-wrong") as http:
        assert_openai_error(http.post(CHAT, json=body), 401)
        assert_openai_error(http.get("/admin/v1/state"), 401)
    with platform.http() as http:
        assert_openai_error(http.get("/admin/v1/state"), 401)
    assert httpx.get(f"{platform.url}/health").status_code == 200
    assert httpx.get(f"{platform.url}/ready").status_code == 200


def test_a_limited_key_is_held_to_its_models_and_its_rate(platform: Platform) -> None:
    with platform.http(platform.limited_key) as http:
        assert_openai_error(http.post(CHAT, json={"model": COLD, "messages": HELLO}), 403, HOT)
        statuses = [
            http.post(CHAT, json={"model": HOT, "messages": HELLO, "max_tokens": 1})
            for _ in range(5)
        ]
    refused = [response for response in statuses if response.status_code == 429]
    assert refused
    assert_openai_error(refused[0], 429)
    assert int(refused[0].headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
def test_media_elsewhere_are_not_fetched(platform: Platform, path: str) -> None:
    link = {"type": "image_url", "image_url": {"url": f"{platform.url}/health"}}
    with platform.http() as http:
        body = {"model": HOT, "messages": [{"role": "user", "content": [link]}]}
        assert_openai_error(http.post(path, json=body), 400, "data:image/png")


def test_two_hundred_connections_at_once_are_all_answered(platform: Platform) -> None:
    async def ask() -> list[int]:
        limits = httpx.Limits(max_connections=200)
        headers = {"Authorization": f"Bearer {platform.key}"}
        async with httpx.AsyncClient(
            base_url=platform.url, limits=limits, headers=headers, timeout=120
        ) as http:
            body = {"model": HOT, "messages": HELLO, "max_tokens": 1}
            answers = await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(200)))
        return [answer.status_code for answer in answers]

    assert set(asyncio.run(ask())) == {200}


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuth",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["slow headers", "slow body"],
)
def test_slow_clients_are_cut_off_and_hold_up_nobody(platform: Platform, sent: bytes) -> None:
    host, port = platform.url.removeprefix("http://").split(":")
    key = b"\r\nAuthorization: Bearer " + platform.key.encode()
    sent = sent.replace(b"Host: localhost", b"Host: localhost" + key)
    slow = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for sock in slow:
            sock.sendall(sent)
            sock.settimeout(15)
        with platform.http() as http:
            assert fastest(lambda: http.get("/v1/models").raise_for_status(), 5) < 1
        for sock in slow:
            answer = b""
            while piece := sock.recv(4096):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 408 ")
    finally:
        for sock in slow:
            sock.close()
