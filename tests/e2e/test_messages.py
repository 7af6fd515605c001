"""The Messages API as its clients meet it: Anthropic's own SDK, and what Claude Code sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.conftest import COLD, HOT, Platform

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

ASK: list[Any] = [{"role": "user", "content": "List three colours."}]
TOOL: Any = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
# As Claude Code sends them.
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-helper-method": "stream",
}


@pytest.fixture
def client(platform: Platform) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=platform.url, api_key=platform.key, max_retries=0
    ) as connected:
        yield connected


@pytest.fixture
def code(platform: Platform) -> Iterator[httpx.Client]:
    """Claude Code's HTTP client."""
    headers = {**HEADERS, "x-api-key": platform.key}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=120) as connected:
        yield connected


def test_a_session_of_anthropics_client(client: anthropic.Anthropic) -> None:
    # Greedy: others may be short.
    greedy = {"temperature": 0}
    asked: Any = {"model": HOT, "messages": ASK, "system": "Be brief.", "extra_body": greedy}
    counted = client.messages.count_tokens(model=HOT, messages=ASK, system="Be brief.")
    answer = client.messages.create(**asked, max_tokens=6)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
    read = answer.usage.cache_read_input_tokens or 0
    assert answer.usage.input_tokens + read == counted.input_tokens
    with client.messages.stream(**asked, max_tokens=6) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
    assert whole.content[0].text == text  # type: ignore[union-attr]
    assert {each.id for each in client.models.list()} == {HOT, COLD}


def test_an_answer_goes_on_with_the_assistants_last_message(client: anthropic.Anthropic) -> None:
    def counted(*more: Any) -> int:
        count = client.messages.count_tokens(model=HOT, messages=[*ASK, *more])
        return count.input_tokens

    begun = {"role": "assistant", "content": "Red, green and"}
    answered = counted(begun, *ASK) - counted(*ASK)
    # Neither is the assistant's message closed, nor another one opened.
    assert counted() < counted(begun) < counted() + answered
    assert client.messages.create(model=HOT, messages=[*ASK, begun], max_tokens=4).content
    assert counted({"role": "assistant", "content": ""}) == counted()


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": HOT, "messages": ASK, "max_tokens": 8}
    asked["extra_body"] = {"temperature": 0}
    word = client.messages.create(**asked).content[0].text.split()[2]
    for streams in (False, True):
        asked["stop_sequences"] = [word]
        if streams:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)


@pytest.mark.parametrize(
    ("asked", "error", "kind"),
    [
        ({"model": "gpt-9"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": 10**6}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "tool"}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"temperature": "warm"}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_errors_are_those_that_anthropics_client_knows(
    client: anthropic.Anthropic,
    asked: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    streams: bool,
) -> None:
    body = {"model": HOT, "messages": ASK, "max_tokens": 5, "stream": streams, **asked}
    with pytest.raises(error) as refused:
        client.post("/v1/messages", body=body, cast_to=object)
    told: Any = refused.value.body
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == refused.value.request_id


def test_a_wrong_key_is_an_authentication_error(platform: Platform) -> None:
    with (
        anthropic.Anthropic(base_url=platform.url, api_key="lsk-no", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(model=HOT, messages=ASK, max_tokens=5)
    told: Any = refused.value.body
    assert told["error"]["type"] == "authentication_error"


def test_what_claude_code_sends_goes_through(code: httpx.Client) -> None:
    assert code.head("/").status_code < 500
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0"},
        {"type": "text", "text": "You are a CLI.", "cache_control": {"type": "ephemeral"}},
    ]
    said = [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
    ]
    asked: Any = {"model": HOT, "messages": [{"role": "user", "content": said}], "system": system}
    count = code.post("/v1/messages/count_tokens?beta=true", json=asked)
    assert count.json()["input_tokens"] > 10, count.text
    body = {
        **asked,
        "max_tokens": 8,
        "metadata": {"user_id": "user_1"},
        "temperature": 1,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "stream": True,
    }
    names = [name for name, _ in _events(code, body)]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert "content_block_delta" in names
    assert "error" not in names


def test_tools_are_counted_and_answered_or_refused_by_name(code: httpx.Client) -> None:
    asked: Any = {"model": HOT, "messages": ASK}
    plain, with_tool = (
        code.post("/v1/messages/count_tokens", json={**asked, **more}).json()["input_tokens"]
        for more in ({}, {"tools": [TOOL], "tool_choice": {"type": "none"}})
    )
    assert with_tool >= plain


def _events(code: httpx.Client, body: dict[str, Any]) -> list[tuple[str, Any]]:
    with code.stream("POST", "/v1/messages?beta=true", json=body) as answer:
        lines = list(answer.iter_lines())
        assert answer.status_code == 200, lines
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [each["type"] for each in data] == named
    return list(zip(named, data, strict=True))
