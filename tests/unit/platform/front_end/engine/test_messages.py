"""What the Messages API makes of vLLM's chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from vllm.entrypoints.anthropic import serving
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from loomserve.platform.front_end.engine.answers.messages import Messages, use_messages

ASK = {"role": "user", "content": "List three colours."}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content[0] if len(content) == 1 else list(content)}


@pytest.mark.parametrize(
    "last", [assistant("Red,"), assistant([{"type": "text", "text": "Red,"}]), assistant(" ")]
)
@pytest.mark.parametrize("counts", [False, True])
def test_an_answer_goes_on_with_the_assistants_last_message(last: Any, counts: bool) -> None:
    messages = [ASK, last]
    asked = (
        AnthropicCountTokensRequest(model="m", messages=messages)
        if counts
        else AnthropicMessagesRequest(model="m", messages=messages, max_tokens=5)
    )
    chat = Messages.to_chat_completion_request(asked)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    assert len(chat.messages) == 2


@pytest.mark.parametrize(
    ("messages", "left"),
    [
        ([ASK], 1),
        ([ASK, assistant("Red."), ASK], 3),
        ([ASK, assistant("")], 1),
        ([ASK, assistant([CALL])], 2),
        ([ASK, assistant({"type": "text", "text": "I look."}, CALL)], 2),
        (
            [ASK, assistant([CALL]), {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "red"}
            ]}],
            3,
        ),
    ],
)  # fmt: skip
def test_any_other_begins_a_message(messages: list[Any], left: int) -> None:
    asked = AnthropicMessagesRequest(model="m", messages=messages, max_tokens=5)
    chat = Messages.to_chat_completion_request(asked)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)
    assert len(chat.messages) == left


def of_vllm() -> Messages:
    made = object.__new__(Messages)
    made.stop_reason_map = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return made


def chat(finish: str, *, calls: Sequence[Any] = (), stop: Any = None) -> ChatCompletionResponse:
    usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    usage["prompt_tokens_details"] = {"cached_tokens": 4, "created_cache_tokens": 3}
    message = {"role": "assistant", "content": "Red", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
    return ChatCompletionResponse.model_validate(
        {"model": "m", "choices": [choice], "usage": usage}
    )


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
ENDS = [
    ("stop", (), None, "end_turn", None),
    ("stop", (), "Blue", "stop_sequence", "Blue"),
    ("stop", (), 7, "end_turn", None),
    ("length", (), None, "max_tokens", None),
    ("tool_calls", CALLS, None, "tool_use", None),
    ("stop", CALLS, None, "tool_use", None),
    ("length", CALLS, None, "max_tokens", None),
]


@pytest.mark.parametrize(("finish", "calls", "stop", "reason", "sequence"), ENDS)
def test_why_an_answer_ended(
    finish: str, calls: Any, stop: Any, reason: str, sequence: Any
) -> None:
    answer = of_vllm().messages_full_converter(chat(finish, calls=calls, stop=stop))
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (5, 4)


def chunk(**choice: Any) -> str:
    choices = [{"index": 0, "delta": {}, **choice}] if choice else []
    said = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    usage["prompt_tokens_details"] = {"cached_tokens": 4, "created_cache_tokens": 3}
    whole = {**said, "choices": choices, "usage": usage}
    return f"data: {json.dumps(whole, separators=(',', ':'))}\n\n"


def events(chunks: Sequence[str]) -> list[tuple[str, Any]]:
    """The stream that clients get of vLLM's."""

    async def given() -> AsyncIterator[str]:
        for each in chunks:
            yield each

    async def collected() -> list[str]:
        return [each async for each in of_vllm().message_stream_converter(given())]  # type: ignore[arg-type]

    told = [each.strip().split("\n") for each in asyncio.run(collected())]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in told]


@pytest.mark.parametrize(("finish", "calls", "stop", "reason", "sequence"), ENDS)
def test_why_a_stream_ended(finish: str, calls: Any, stop: Any, reason: str, sequence: Any) -> None:
    said = [{"index": 0, **call} for call in calls]
    told = events(
        [
            chunk(delta={"role": "assistant", "content": ""}),
            chunk(delta={"content": 'Red "tool_calls":[{'}),
            *([chunk(delta={"tool_calls": said})] if said else []),
            chunk(finish_reason=finish, stop_reason=stop),
            chunk(),
            "data: [DONE]\n\n",
        ]
    )
    ((delta, usage),) = [
        (event["delta"], event["usage"]) for name, event in told if name == "message_delta"
    ]
    assert usage == {"output_tokens": 2, "input_tokens": 5, "cache_read_input_tokens": 4}
    assert (delta["stop_reason"], delta.get("stop_sequence")) == (reason, sequence)
    assert told[0][0] == "message_start"
    assert told[-1][0] == "message_stop"


def test_a_stream_that_fails_ends_with_the_error_itself() -> None:
    failed = {
        "error": {"message": "The grammar is broken.", "type": "BadRequestError", "code": 400}
    }
    told = events(
        [
            chunk(delta={"role": "assistant", "content": ""}),
            chunk(delta={"content": "Red"}),
            f"data: {json.dumps(failed)}\n\n",
            "data: [DONE]\n\n",
        ]
    )
    assert [name for name, _ in told][-1] == "error"
    error = {"type": "invalid_request_error", "message": "The grammar is broken."}
    assert told[-1][1] == {"type": "error", "error": error}
    assert "message_stop" not in dict(told)


def test_vllms_servers_answer_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "AnthropicServingMessages", serving.AnthropicServingMessages)
    use_messages()
    assert serving.AnthropicServingMessages is Messages
