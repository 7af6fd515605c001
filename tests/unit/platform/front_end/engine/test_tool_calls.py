"""What clients are told of answers that call tools, by vLLM's own classes and parsers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import FunctionCall, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager

from loomserve.platform.front_end.engine.answers.tool_calls import correct_tool_calls
from loomserve.platform.models import simulated

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "find"}}
ARGUMENTS = '{"what": "a {b} \\u00e9"}'
CALL = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(simulated.fetch())


def serving(kind: type[Any], parser: str | None = "hermes") -> Any:
    """One of vLLM's endpoints, without an engine."""
    made = object.__new__(kind)
    found = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=parser is not None)
    model = SimpleNamespace(max_model_len=4096, hf_config=SimpleNamespace(model_type="llama"))
    made.__dict__.update(
        parser_cls=found, parser=found, enable_auto_tools=parser is not None,
        response_role="assistant",
        enable_log_outputs=False, request_logger=None, enable_prompt_tokens_details=False,
        enable_force_include_usage=False, enable_per_request_metrics=False, enable_log_deltas=False,
        return_tokens_as_token_ids=False, default_chat_template_kwargs={}, system_fingerprint=None,
        _include_reasoning_tokens_details=False, model_config=model, chat_template=None,
        chat_template_content_format="auto", log_error_stack=False,
        stop_reason_map={"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    )  # fmt: skip
    state = SimpleNamespace(
        openai_serving_chat=made if kind is OpenAIServingChat else None,
        anthropic_serving_messages=made if kind is AnthropicServingMessages else None,
        openai_serving_responses=made if kind is OpenAIServingResponses else None,
    )
    correct_tool_calls(state)
    assert isinstance(made, kind)
    return made


async def results(
    text: str, ended: str, at: str | None, stream: bool
) -> AsyncIterator[RequestOutput]:
    """The text, a few characters at a time, of which each is a token."""
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)] if stream else [text]
    for count, piece in enumerate(pieces, 1):
        last = count == len(pieces)
        ids = tokenizer().encode(piece, add_special_tokens=False)
        output = CompletionOutput(0, piece, ids, 0.0, None, finish_reason=None)
        if last:
            output.finish_reason, output.stop_reason = ended, at
        yield RequestOutput("r", "", [1], None, [output], finished=last)


def answer(
    text: str, ended: str, stream: bool, at: str | None = None, kind: type[Any] = OpenAIServingChat,
    **fields: object,
) -> Any:  # fmt: skip
    """The answer to a chat: vLLM's object, or all chunks of a stream."""
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], stream=stream, **fields
    )
    made = serving(kind)
    given: Any = (results(text, ended, at, stream), "r", "m", [], tokenizer())
    noted = RequestResponseMetadata(request_id="r")

    async def full() -> Any:
        parser = made.parser_cls(tokenizer(), request.tools)
        return await made.chat_completion_full_generator(request, *given, noted, parser=parser)

    async def streamed() -> list[str]:
        chunks = made.chat_completion_stream_generator(request, *given, noted)
        if kind is AnthropicServingMessages:
            chunks = made.message_stream_converter(chunks)
        return [chunk async for chunk in chunks]

    return asyncio.run(streamed() if stream else full())


def said(text: str, ended: str, stream: bool, **fields: Any) -> tuple[str, list[str]]:
    """Why an answer ended as its client is told, and the arguments of its calls."""
    got = answer(text, ended, stream, **fields)
    if not stream:
        (choice,) = got.choices
        return choice.finish_reason, [c.function.arguments for c in choice.message.tool_calls]
    calls: dict[int, str] = {}
    reason = ""
    for chunk in got:
        if "[DONE]" not in chunk:
            for choice in json.loads(chunk.removeprefix("data: "))["choices"]:
                reason = choice["finish_reason"] or reason
                for call in choice["delta"].get("tool_calls") or ():
                    more = call["function"].get("arguments") or ""
                    calls[call["index"]] = calls.get(call["index"], "") + more
    return reason, [*calls.values()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "reason", "calls"),
    [
        ("auto", CALL, "tool_calls", 1),
        ("auto", f"Well. {CALL}", "tool_calls", 1),
        ("auto", f"{CALL}\n{CALL}", "tool_calls", 2),
        ("auto", "No call at all.", "stop", 0),
        ("none", "No call at all.", "stop", 0),
        ("required", CALL, "tool_calls", 1),
        (NAMED, CALL, "tool_calls", 1),
    ],
)
def test_an_answer_that_called_tools_says_so_and_no_other(
    stream: bool, choice: object, text: str, reason: str, calls: int
) -> None:
    told = said(text, "stop", stream, tools=[TOOL], tool_choice=choice)
    assert told[0] == reason
    assert [json.loads(each) for each in told[1]] == [json.loads(ARGUMENTS)] * calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("missing", [5, 20, 40])
def test_a_call_that_is_cut_off_by_length_ended_by_length(
    stream: bool, choice: object, missing: int
) -> None:
    told = said(CALL[:-missing], "length", stream, tools=[TOOL], tool_choice=choice)
    assert told[0] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_stop_string_in_a_call_is_the_end_and_one_after_it_is_not(
    stream: bool, choice: object
) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "stop": ["{b}"], "at": "{b}"}
    cut = CALL[: CALL.index("{b}")]
    assert said(cut, "stop", stream, **fields)[0] == "stop"
    assert said(f"{CALL}\n", "stop", stream, **fields)[0] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_where_no_more_are_wanted(stream: bool) -> None:
    told = said(f"{CALL}\n{CALL}", "stop", stream, tools=[TOOL], parallel_tool_calls=False)
    assert told == ("tool_calls", told[1][:1])


@pytest.mark.parametrize("ended", ["stop", "length"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_tools_is_vllms(stream: bool, ended: str) -> None:
    assert said("Hello.", ended, stream) == (ended, [])


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [(CALL, "stop", "tool_use"), (CALL[:-20], "length", "max_tokens"), ("No.", "stop", "end_turn")],
)
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_messages_say_it_in_anthropics_words(
    stream: bool, choice: object, text: str, ended: str, reason: str
) -> None:
    if text == "No." and choice != "auto":
        return
    got = answer(
        text, ended, stream, kind=AnthropicServingMessages, tools=[TOOL], tool_choice=choice,
        stream_options={"include_usage": True} if stream else None,
    )  # fmt: skip
    if stream:
        told = [line for chunk in got for line in chunk.split("\n") if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in told]
        (found,) = [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"]
    else:
        message = serving(AnthropicServingMessages).messages_full_converter(got)
        found = message.stop_reason
        assert all(isinstance(b.input, dict) for b in message.content if b.type == "tool_use")
    assert found == reason


def test_a_call_whose_arguments_were_cut_off_is_an_object_in_messages() -> None:
    got = answer(CALL, "length", False, kind=AnthropicServingMessages, tools=[TOOL])
    got.choices[0].message.tool_calls[0].function.arguments = '{"what": "a'
    message = serving(AnthropicServingMessages).messages_full_converter(got)
    assert (message.stop_reason, message.content[0].input) == ("max_tokens", {})


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("kind", [OpenAIServingChat, AnthropicServingMessages])
def test_tools_without_a_parser_are_refused_with_the_field_that_would_mend_it(
    kind: type[Any], choice: object
) -> None:
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=[TOOL], tool_choice=choice
    )
    refused = asyncio.run(serving(kind, parser=None)._create_chat_completion(request))
    assert (refused.error.code, refused.error.param) == (400, "tools")
    assert "models[].engine.tool_call_parser" in refused.error.message


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "find"}])
def test_responses_refuse_them_as_well(choice: object) -> None:
    tool = {"type": "function", **TOOL["function"]}
    request = ResponsesRequest(model="m", input="x", tools=[tool], tool_choice=choice)
    made = serving(OpenAIServingResponses, parser=None)
    refused = asyncio.run(made._create_responses(request))
    assert (refused.error.code, refused.error.param) == (400, "tools")


def test_tools_that_are_not_to_be_called_need_no_parser() -> None:
    made = serving(OpenAIServingChat, parser=None)
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=[TOOL], tool_choice="none"
    )
    with pytest.raises(AttributeError):  # it goes on to vLLM's class, which has no engine here
        asyncio.run(made._create_chat_completion(request))


@pytest.mark.parametrize(("ended", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_call_of_a_response_that_was_cut_off_is_incomplete(ended: str, status: str) -> None:
    class CutOff:
        def parse(self, *_: object, **__: object) -> tuple[None, None, list[FunctionCall]]:
            return None, None, [FunctionCall(name="find", arguments='{"what": "a')]

    tool = {"type": "function", **TOOL["function"]}
    request = ResponsesRequest(model="m", input="x", tools=[tool])
    output = CompletionOutput(0, "", [], 0.0, None, finish_reason=ended)
    made = serving(OpenAIServingResponses)
    (item,) = made._make_response_output_items(request, output, tokenizer(), parser=CutOff())
    assert (item.type, item.status) == ("function_call", status)


@pytest.mark.parametrize(("parallel", "calls"), [(None, 2), (True, 2), (False, 1)])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_response_has_one_call_where_no_more_are_wanted(
    choice: str, parallel: bool | None, calls: int
) -> None:
    tool = {"type": "function", **TOOL["function"]}
    request = ResponsesRequest(
        model="m", input="x", tools=[tool], tool_choice=choice, parallel_tool_calls=parallel
    )
    text = f"{CALL}\n{CALL}"
    made = serving(OpenAIServingResponses)

    def parser() -> Any:
        return made._make_response_parser(request, tokenizer(), {})

    *_, whole = parser().parse(text, request, enable_auto_tools=True)
    assert len(whole) == calls
    streamed, streaming = set(), parser()
    for at in range(0, len(text), 3):
        piece, finished = text[at : at + 3], at + 3 >= len(text)
        ids = tokenizer().encode(piece, add_special_tokens=False)
        delta = streaming.parse_delta(
            delta_text=piece, delta_token_ids=ids, request=request, prompt_token_ids=[1],
            finished=finished,
        )  # fmt: skip
        streamed |= {call.index for call in delta.tool_calls} if delta else set()
    assert streamed == set(range(calls))
