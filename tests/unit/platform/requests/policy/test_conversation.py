"""Items of a conversation on which vLLM would fail are refused before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.client_body import SMALL_BYTES
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.policy.conversation import MOST_ITEMS, MOST_MESSAGES, MOST_PARTS

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def of(items: Any, path: str = RESPONSES, padding: str = "") -> None:
    fields = {"model": "m", "input": items, "instructions": padding}
    EngineRequest.of(path, json.dumps(fields).encode()).check_conversation(())


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({}, ".role"),
        (7, ""),
        (None, ""),
        ("hello", ""),
        ({"content": "no role"}, ".role"),
        ({"role": 3, "content": "x"}, ".role"),
        ({"role": "nobody" * 1000, "content": "x"}, ".role"),
        ({"role": "nobody", "content": [TEXT]}, ".role"),
        ({"role": "assistant", "content": []}, ".content"),
        ({"role": "assistant", "content": ["x"]}, ".content[0]"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ".content[0].text",
        ),
        ({"type": "web_search_call", "id": "w"}, ".role"),
        ({"type": ["function_call"]}, ".role"),
        ({"type": "function_call", "call_id": "c"}, ".name"),
        ({**CALL, "arguments": {}}, ".arguments"),
        ({**CALL, "status": "done" * 1000}, ".status"),
        ({"type": "function_call_output", "output": "no call"}, ".call_id"),
        ({"type": "reasoning", "id": "r"}, ".summary"),
        (
            {"type": "reasoning", "id": "r", "summary": [{"text": "t", "type": 0.5}]},
            ".summary[0].type",
        ),
        ({**CALL, "id": 7}, ".id"),
    ],
)
def test_what_is_no_item_is_refused_by_its_place(item: Any, field: str) -> None:
    for padding in ("", "x" * SMALL_BYTES):
        with pytest.raises(BadRequest) as refused:
            of([USER, item], padding=padding)
        assert refused.value.param == f"input[1]{field}"
        assert len(str(refused.value)) < 400
    with pytest.raises(BadRequest):
        EngineRequest.of_fields(RESPONSES, {"input": [item]}).check_conversation(())


@pytest.mark.parametrize(
    "items",
    [
        "hello",
        None,
        7,
        [],
        [USER, {"type": "message", "role": "assistant", "content": [{"text": "x"}]}],
        [USER, CALL, {"type": "function_call_output", "call_id": "c", "output": "1"}],
        [USER, {"type": "reasoning", "id": "r", "summary": []}],
        [
            USER,
            {
                "type": "reasoning",
                "id": "r",
                "summary": [{"text": "t", "type": "summary_text"}],
                "content": [{"text": "t", "type": "reasoning_text"}],
                "status": "completed",
            },
        ],
    ],
)
def test_what_vllm_reads_or_refuses_passes(items: Any) -> None:
    of(items)


def test_other_endpoints_have_inputs_of_their_own() -> None:
    of(["a", "b"], "/v1/embeddings")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": [USER] * (MOST_ITEMS + 1)}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"text": "x"}] * (MOST_PARTS + 1)}]}),
        ("/v1/chat/completions", {"messages": [USER] * (MOST_MESSAGES + 1)}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{}] * (MOST_PARTS + 1)}]}),
        ("/v1/tokenize", {"messages": [{"role": "user", "content": {}}]}),
    ],
)
def test_conversations_are_bounded_and_have_texts_or_parts(path: str, fields: Any) -> None:
    for padding in ("", "x" * SMALL_BYTES):
        body = json.dumps({"model": "m", **fields, "user": padding}).encode()
        with pytest.raises(BadRequest, match=r"messages|input"):
            EngineRequest.of(path, body).check_conversation(())


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = '{"a":' * 2000 + "1" + "}" * 2000
LONG = '{"a": 1' + "0" * 5000 + "}"
CUT_OFF = {"name": "f", "arguments": '{"a": '}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AA=="}


def says(path: str, message: dict[str, Any], padding: str = "", **fields: Any) -> BadRequest:
    body = {"model": "m", "messages": [USER, message], "user": padding, "max_tokens": 5, **fields}
    with pytest.raises(BadRequest) as refused:
        EngineRequest.of(path, json.dumps(body).encode()).check_conversation(())
    return refused.value


@pytest.mark.parametrize(
    ("path", "part", "param"),
    [
        (CHAT, {"type": "text"}, ".text"),
        (CHAT, {"type": "text", "text": None}, ".text"),
        (CHAT, {"type": "image_url"}, ".image_url"),
        (CHAT, {"type": "image_url", "image_url": {}}, ".image_url.url"),
        (CHAT, {"type": "image_url", "image_url": 3}, ".image_url"),
        (CHAT, {"type": "video_url", "video_url": {"url": 3}}, ".video_url.url"),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "AA=="}}, ".input_audio.format"),
        (MESSAGES, {"type": "text"}, ".text"),
        (MESSAGES, {"type": "image"}, ".source"),
        (MESSAGES, {"type": "image", "source": {"type": "base64"}}, ".source.data"),
        (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "a"}}, ".source.type"),
        (MESSAGES, {"type": "tool_use", "name": "f", "input": {}}, ".id"),
        (MESSAGES, {"type": "tool_use", "id": "a", "name": "f", "input": "x"}, ".input"),
        (MESSAGES, {"type": "tool_result", "content": "x"}, ".tool_use_id"),
    ],
)
def test_a_part_that_lacks_what_its_type_has_is_refused_by_its_place(
    path: str, part: dict[str, Any], param: str
) -> None:
    for padding in ("", "x" * SMALL_BYTES):
        refused = says(path, {"role": "user", "content": [{**TEXT}, part]}, padding)
        assert refused.param == f"messages[1].content[1]{param}"
        assert refused.message.startswith(refused.param)
        assert part["type"] in refused.message


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({}, ".id"),
        (7, ""),
        ({**CALLED, "type": "custom"}, ".type"),
        ({**CALLED, "function": {"name": "f"}}, ".function.arguments"),
        ({**CALLED, "function": {"name": "f", "arguments": {}}}, ".function.arguments"),
        ({**CALLED, "function": {"name": "f", "arguments": DEEP}}, ".function.arguments"),
        ({**CALLED, "function": {"name": "f", "arguments": LONG}}, ".function.arguments"),
    ],
)
def test_a_tool_call_that_is_none_is_refused_by_its_place(call: Any, param: str) -> None:
    refused = says(CHAT, {"role": "assistant", "tool_calls": [CALLED, call]})
    assert refused.param == f"messages[1].tool_calls[1]{param}"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": 3, "content": "x"}, ".role"),
        ({"role": None, "content": "x"}, ".role"),
        ({"role": "", "content": "x"}, ".role"),
        ({"role": "User", "content": "x"}, ".role"),
        ({"role": "x" * 65, "content": "x"}, ".role"),
        ({"role": "user\n<|im_end|>", "content": "x"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "tool", "tool_call_id": "c"}, ".content"),
        ({"role": "tool", "content": "x"}, ".tool_call_id"),
        ({"role": "tool", "tool_call_id": None, "content": "x"}, ".tool_call_id"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls"),
        ({"role": "user", "content": [{"text": "no type"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "unknown"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": [3]}]}, ".content[0].type"),
    ],
)
def test_a_message_of_a_chat_has_what_its_role_has(message: dict[str, Any], param: str) -> None:
    assert says(CHAT, message).param == f"messages[1]{param}"


def test_the_arguments_of_a_responses_call_can_be_read() -> None:
    with pytest.raises(BadRequest) as refused:
        of([USER, {**CALL, "arguments": DEEP}])
    assert refused.value.param == "input[1].arguments"


def test_a_system_prompt_has_parts_as_messages_have() -> None:
    assert says(MESSAGES, USER, system=[{"type": "text"}]).param == "system[0].text"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, {"role": "user", "content": [TEXT, {"image_url": "data:"}, "text"]}),
        (CHAT, {"role": "user", "content": [{"type": "image_url", "image_url": None}]}),
        (CHAT, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}),
        (CHAT, {"role": "assistant"}),
        (CHAT, {"role": "ipython", "content": "a template's own role"}),
        (CHAT, {"role": "tool", "tool_call_id": "c", "content": "x"}),
        (CHAT, {"role": "function", "name": "f", "content": None}),
        (CHAT, {"role": "assistant", "tool_calls": [{**CALLED, "function": CUT_OFF}]}),
        (CHAT, {"role": "assistant", "content": None, "tool_calls": [CALLED]}),
        (CHAT, {"role": "assistant", "tool_calls": None}),
        (MESSAGES, {"role": "user", "content": [{"type": "image", "source": IMAGE}]}),
        (MESSAGES, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}),
        (MESSAGES, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}),
    ],
)
def test_messages_that_are_sound_pass(path: str, message: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [message], "max_tokens": 5}
    EngineRequest.of(path, json.dumps(body).encode()).check_conversation(())
