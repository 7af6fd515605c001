"""Tools on a model as it is configured without a word of tools, over all APIs of chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import HOT, Platform

pytestmark = pytest.mark.e2e

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
ASKED = [{"role": "user", "content": "How warm is it in Paris?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat(platform: Platform, **fields: Any) -> Any:
    return platform.client().chat.completions.create(
        model=HOT, temperature=0, tools=[{"type": "function", "function": FUNCTION}], **fields
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_chat_calls_a_tool_gets_its_result_and_goes_on(platform: Platform, choice: Any) -> None:
    first = chat(platform, messages=ASKED, tool_choice=choice, max_tokens=64).choices[0]
    (call, *_) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["unit"] in {"C", "F"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    said = first.message.model_dump(exclude_none=True, include={"role", "tool_calls"})
    said["tool_calls"] = said["tool_calls"][:1]
    second = chat(platform, messages=[*ASKED, said, result], max_tokens=8).choices[0]
    assert second.finish_reason in {"stop", "length", "tool_calls"}


def test_a_stream_says_the_same_and_a_cut_one_that_it_was_cut(platform: Platform) -> None:
    for most, reason in ((64, "tool_calls"), (9, "length")):
        chunks = [*chat(platform, messages=ASKED, tool_choice=NAMED, max_tokens=most, stream=True)]
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason


def test_responses_and_messages_call_it_too(platform: Platform) -> None:
    response = platform.client().responses.create(
        model=HOT, input="How warm is it?", tool_choice="required", max_output_tokens=64,
        tools=[{"type": "function", "strict": True, **FUNCTION}],
    )  # fmt: skip
    assert response.status == "completed"
    assert "function_call" in [each.type for each in response.output]
    with platform.http() as http:
        message = http.post(
            "/v1/messages",
            json={
                "model": HOT, "max_tokens": 64, "messages": ASKED,
                "tools": [{"name": "weather", "input_schema": PARAMETERS}],
                "tool_choice": {"type": "tool", "name": "weather"},
            },
        ).json()  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    assert message["content"][-1]["input"]["unit"] in {"C", "F"}


def test_operators_see_the_parser_and_why_it_was_chosen(platform: Platform) -> None:
    (model,) = [each for each in platform.state()["models"] if each["name"] == HOT]
    assert model["parsers"]["tool_call"]["name"] == "hermes"
    assert "template" in model["parsers"]["tool_call"]["why"]
