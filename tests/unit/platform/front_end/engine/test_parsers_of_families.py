"""vLLM's parsers, by the names that are chosen for families, read what those families write."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager

from loomserve.platform.models import simulated
from loomserve.platform.models.policy.families import REASONING, TOOL_CALLS
from tests.unit.platform.front_end.engine.test_tool_calls import serving

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
ARGUMENTS = '{"what": "x"}'
NAMED = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
XML = "<function=find>\n<parameter=what>\nx\n</parameter>\n</function>\n"
CALLS, CALL = "tool▁calls▁begin", "tool▁call▁begin"

# ~ stands for DeepSeek's wide bar.
WRITTEN = {
    "hermes": f"<tool_call>\n{NAMED}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{XML}</tool_call>",
    # Its values are verbatim.
    "mimo": f"<tool_call>\n{XML}</tool_call>".replace("\nx\n", "x"),
    "step3p5": f"<tool_call>\n{XML}</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{XML}</seed:tool_call>",
    "llama3_json": f'{{"name": "find", "parameters": {ARGUMENTS}}}',
    "llama4_pythonic": '<|python_start|>[find(what="x")]<|python_end|>',
    "pythonic": '[find(what="x")]',
    "olmo3": '<function_calls>\nfind(what="x")\n</function_calls>',
    "lfm2": '<|tool_call_start|>[find(what="x")]<|tool_call_end|>',
    "mistral": f"[TOOL_CALLS][{NAMED}]",
    "deepseek_v3": f"<~{CALLS}~><~{CALL}~>function<~tool▁sep~>find\n```json\n{ARGUMENTS}\n```"
    "<~tool▁call▁end~><~tool▁calls▁end~>",
    "deepseek_v31": f"<~{CALLS}~><~{CALL}~>find<~tool▁sep~>{ARGUMENTS}"
    "<~tool▁call▁end~><~tool▁calls▁end~>",
    "glm47": "<tool_call>find<arg_key>what</arg_key><arg_value>x</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f"<|tool_call|>[{NAMED}]",
    "granite4": f"<tool_call>\n{NAMED}\n</tool_call>",
    "granite-20b-fc": f"<function_call> {NAMED}",
    "phi4_mini_json": f"functools[{NAMED}]",
    "jamba": f"<tool_calls>[{NAMED}]</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{NAMED}]</tool_calls>",
    "internlm": f"<|action_start|><|plugin|>\n{NAMED}<|action_end|>",
    "xlam": f"[{NAMED}]",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="find">\n'
    '<parameter name="what">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "functiongemma": "<start_function_call>call:find{what:<escape>x<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:find{what:<|"|>x<|"|>}<tool_call|>',
    "ernie45": f"<tool_call>\n{NAMED}\n</tool_call>",
    "apertus": f'<|tools_prefix|>[{{"find": {ARGUMENTS}}}]<|tools_suffix|>',
    "gigachat3": f"function call<|role_sep|>\n{NAMED}",
}
THOUGHT = {
    "qwen3": "<think>Hm.</think>",
    "deepseek_r1": "Hm.</think>",
    "mimo": "<think>Hm.</think>",
    "glm47": "<think>Hm.</think>",
    "kimi_k2": "<think>Hm.</think>",
    "nemotron_v3": "<think>Hm.</think>",
    "minimax_m2": "Hm.</think>",
    "seed_oss": "<seed:think>Hm.</seed:think>",
    "granite": "Here is my thought process: Hm. Here is my response: ",
    "step3": "Hm.</think>",
    "step3p5": "<think>Hm.</think>",
    "hunyuan_a13b": "<think>\nHm.\n</think>\n<answer>\n",
}


def families(parser: str) -> frozenset[str]:
    """The tokens that the table says a parser looks up."""
    return frozenset(t for f in TOOL_CALLS + REASONING if f.parser == parser for t in f.tokens)


@cache
def tokenizer(parser: str) -> Any:
    """One that has the marks of a family as tokens, beside bytes."""
    made = AutoTokenizer.from_pretrained(simulated.fetch())
    marks = set(re.findall(r"<[^<>\s]+>", bar(WRITTEN.get(parser, ""))))
    made.add_tokens(sorted(families(parser) | marks), special_tokens=True)
    return made


def bar(text: str) -> str:
    return text.replace("~", "\uff5c")


def request() -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=[TOOL]
    )


def made(tool_call: str | None, reasoning: str = "") -> Any:
    kind = ParserManager.get_parser(tool_call, reasoning, enable_auto_tools=tool_call is not None)
    assert kind is not None
    return kind(tokenizer(tool_call or reasoning), request().tools)


@pytest.mark.parametrize("parser", WRITTEN)
def test_a_call_is_read(parser: str) -> None:
    _, _, calls = made(parser).parse(bar(WRITTEN[parser]), request(), enable_auto_tools=True)
    assert calls
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [("find", {"what": "x"})]


async def results(parser: str) -> AsyncIterator[RequestOutput]:
    """A family's call, of which each output has a token."""
    words = tokenizer(parser)
    ids = words.encode(bar(WRITTEN[parser]), add_special_tokens=False)
    for count, one in enumerate(ids, 1):
        piece = words.decode([one], skip_special_tokens=False)
        last = count == len(ids)
        output = CompletionOutput(0, piece, [one], 0.0, None)
        output.finish_reason = "stop" if last else None
        yield RequestOutput("r", "", [1], None, [output], finished=last)


@pytest.mark.parametrize("parser", WRITTEN)
def test_a_call_is_read_as_it_is_streamed(parser: str) -> None:
    async def chunks() -> list[str]:
        streamed = ChatCompletionRequest(**(request().model_dump() | {"stream": True}))
        noted = RequestResponseMetadata(request_id="r")
        given: Any = (streamed, results(parser), "r", "m", [], tokenizer(parser), noted)
        made = serving(OpenAIServingChat, parser).chat_completion_stream_generator(*given)
        return [chunk async for chunk in made if "[DONE]" not in chunk]

    name, arguments, reason = "", "", None
    for chunk in asyncio.run(chunks()):
        for choice in json.loads(chunk.removeprefix("data: "))["choices"]:
            reason = choice["finish_reason"]
            for call in choice["delta"].get("tool_calls") or ():
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    assert (name, json.loads(arguments), reason) == ("find", {"what": "x"}, "tool_calls")


# vLLM's parser of InternLM reads the tools of chats alone.
@pytest.mark.parametrize("parser", sorted(WRITTEN.keys() - {"internlm"}))
def test_a_response_streams_it_as_well(parser: str) -> None:
    tools = [{"type": "function", **TOOL["function"]}]
    asked = ResponsesRequest(model="m", input="x", tools=tools, stream=True)
    made = serving(OpenAIServingResponses, parser)
    context = SimpleContext(
        response_parser=made._make_response_parser(asked, tokenizer(parser), {})
    )

    async def contexts() -> AsyncIterator[SimpleContext]:
        async for result in results(parser):
            context.append_output(result)
            yield context

    async def events() -> list[Any]:
        rest: Any = (context, "m", tokenizer(parser), None, 0, lambda event: event)
        got = made._process_simple_streaming_events(asked, None, contexts(), *rest)
        return [event async for event in got]

    told = asyncio.run(events())
    (call,) = (
        event.item
        for event in told
        if event.type == "response.output_item.done" and event.item.type == "function_call"
    )
    assert (call.name, json.loads(call.arguments)) == ("find", {"what": "x"})
    pieces = [e.delta for e in told if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments


@pytest.mark.parametrize("parser", THOUGHT)
def test_reasoning_is_told_from_the_answer(parser: str) -> None:
    thought, said, _ = made(None, parser).parse(f"{THOUGHT[parser]}Yes.", request())
    assert (str(thought).strip(), str(said).strip()) == ("Hm.", "Yes.")


@pytest.mark.parametrize("parser", sorted({each.parser for each in REASONING if each.tokens}))
def test_what_the_table_says_that_a_parser_looks_up_is_all_that_it_does(parser: str) -> None:
    kind = ParserManager.get_parser(None, parser)
    assert kind is not None
    kind(tokenizer(parser), None)
