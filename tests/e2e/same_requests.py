"""Requests that vLLM's own server and the platform are to answer alike, made of small tables.

Each is greedy or has a seed, so that its answer is one text. Each has a ``cache_salt`` of its own,
so that neither side finds blocks of an earlier request, of which the usage would tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loomserve.platform.requests.endpoints import ENDPOINTS
from tests.e2e.conftest import HOT

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE = "/v1/tokenize"
DETOKENIZE = "/v1/detokenize"

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    path: str
    """As the platform's clients name it."""
    body: Fields

    @property
    def batched(self) -> bool:
        """Whether it has several answers, which an engine computes in one step or in several."""
        return self.body.get("n", 1) != 1 or isinstance(self.body.get("prompt"), list)


HELLO = [{"role": "user", "content": "Say hello to Anna."}]
# With the template's own system message a prompt fills a block, and of two answers to it the second
# may find that block or not: it depends on whether an engine takes both up in one step.
BRIEF = [{"role": "system", "content": "Hi."}, *HELLO]
STORY = "Once upon a time there was"
JSON_QUESTION = [{"role": "user", "content": "Describe Paris as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather now", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
SEEDED = {"temperature": 1.0, "seed": 7}
TWO = {**SEEDED, "n": 2}
TOOL_CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Rome"\}\}\n</tool_call>'
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}

# Of chat and of completions, each streamed and not.
GENERATION: dict[str, Fields] = {
    "greedy": {},
    "seeded": SEEDED,
    "hot": {"temperature": 1.8, "seed": 11},
    "large_seed": {"temperature": 1.0, "seed": 2**40},
    "negative_seed": {"temperature": 1.0, "seed": -5},
    "top_k": {**SEEDED, "top_k": 5},
    "top_p": {**SEEDED, "top_p": 0.6},
    "min_p": {**SEEDED, "min_p": 0.2},
    "all_filters": {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.4, "max_tokens": 14},
    "presence": {"presence_penalty": 1.5, "max_tokens": 14},
    "frequency": {"frequency_penalty": 1.2, "max_tokens": 14},
    "all_penalties": {
        **SEEDED,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
    },
    "bias": {"logit_bias": {"28": 50, "30": -100}, "max_tokens": 6},
    "stop": {"stop": "a", "max_tokens": 14},
    "stops": {"stop": ["zzz", " the", "."], "max_tokens": 14},
    "stop_included": {"stop": ["a"], "include_stop_str_in_output": True, "max_tokens": 14},
    "stop_tokens": {"stop_token_ids": [28, 30, 17, 253], "max_tokens": 14},
    "min_tokens": {"stop_token_ids": [28, 30, 17], "min_tokens": 12, "max_tokens": 14},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 14, "logit_bias": {"2": 100}},
    "eos": {"logit_bias": {"2": 100}},
    "eos_shown": {"logit_bias": {"2": 100}, "skip_special_tokens": False, "min_tokens": 2},
    "one_token": {"max_tokens": 1},
    "regex": {"structured_outputs": {"regex": "(yes|no), [a-z]{3}"}},
    "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")+ "."'}},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 24},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": JSON_SCHEMA, "max_tokens": 24},
    "text_format": {"response_format": {"type": "text"}},
    "token_ids": {"return_token_ids": True},
    "special_tokens": {"skip_special_tokens": False, "ignore_eos": True},
    "allowed_tokens": {"allowed_token_ids": [28, 30, 253], "max_tokens": 6},
    "bad_words": {"bad_words": ["Anna", " a", "the"]},
    "truncated": {"truncate_prompt_tokens": 4},
    "truncated_right": {"truncate_prompt_tokens": 4, "truncation_side": "right"},
    "user": {"user": "someone", "vllm_xargs": {"mine": 1}},
    "unknown_field": {"no_such_field": {"a": 1}},
    "repetition_ends": {
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
        "logit_bias": {"28": 100},
    },
}

# Streamed requests only.
STREAM_OPTIONS: dict[str, Fields] = {
    "usage": {"stream_options": {"include_usage": True}},
    "running_usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "only_running_usage": {"stream_options": {"continuous_usage_stats": True}},
    "no_usage": {"stream_options": {"include_usage": False}},
    "null_options": {"stream_options": None},
    "two_with_usage": {
        **TWO,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "token_ids_with_usage": {"return_token_ids": True, "stream_options": {"include_usage": True}},
    "interval": {"stream_interval": 4, "max_tokens": 14, "ignore_eos": True},
}

CHATS: dict[str, Fields] = {
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs_as_ids": {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    "two": {**TWO, "messages": BRIEF},
    "logprobs_of_two": {**TWO, "messages": BRIEF, "logprobs": True, "top_logprobs": 1},
    "logprobs_of_tokens": {"logprobs": True, "logprob_token_ids": [28, 30]},
    "completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "system": {"messages": [{"role": "system", "content": "Be terse."}, *HELLO]},
    "conversation": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "Hello, Anna."},
            {"role": "user", "content": "And to Bert?"},
        ]
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "unicode": {"messages": [{"role": "user", "content": 'Grüße, 你好 \u2028 🙂 "x"'}]},
    "echo": {
        "messages": [*HELLO, {"role": "assistant", "content": "Hello,"}],
        "echo": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "no_generation_prompt": {"add_generation_prompt": False},
    "prompt_text": {"return_prompt_text": True},
    "special_tokens_added": {"add_special_tokens": True, "return_token_ids": True},
    "template_kwargs": {"chat_template_kwargs": {"add_generation_prompt": False}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "tools_none": {"tools": [WEATHER], "tool_choice": "none"},
    "tools_auto": {"tools": [WEATHER], "tool_choice": "auto"},
    "tools_default": {"tools": [WEATHER, CLOCK]},
    "tools_required": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 48},
    "tools_cut_off": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 5},
    "tools_named": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
        "max_tokens": 40,
    },
    "tools_named_two": {
        **TWO,
        "messages": BRIEF,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "tools_parsed": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": TOOL_CALL},
        "max_tokens": 48,
    },
    "text_and_tools_parsed": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": "Well. " + TOOL_CALL},
        "max_tokens": 48,
    },
    "tool_result": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        ],
        "tools": [WEATHER],
    },
}

TEXTS: dict[str, Fields] = {
    "logprobs": {"logprobs": 0},
    "top_logprobs": {"logprobs": 3},
    "logprobs_as_ids": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "echo": {"echo": True},
    "echo_logprobs": {"echo": True, "logprobs": 2, "max_tokens": 4},
    "echo_only": {"echo": True, "max_tokens": 0},
    "echo_only_logprobs": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "two": TWO,
    "echo_two": {**TWO, "echo": True},
    "prompts": {"prompt": [STORY, "One, two,"]},
    "prompts_two": {**TWO, "prompt": [STORY, "One, two,"], "max_tokens": 4},
    "ids": {"prompt": [28, 253, 30, 500, 1000]},
    "id_prompts": {"prompt": [[28, 253, 30], [1000, 2000]], "return_token_ids": True},
    "no_special_tokens": {"add_special_tokens": False},
    "unicode": {"prompt": "Grüße, 你好 🙂", "echo": True, "max_tokens": 4},
    "default_length": {"max_tokens": None, "prompt": "One, two,", "stop": "\n"},
}

# Not streamed: vLLM refuses them in a stream.
WHOLE: dict[str, Fields] = {
    "prompt_logprobs": {"prompt_logprobs": 2, "max_tokens": 2},
    "no_prompt_logprobs": {"prompt_logprobs": 0, "max_tokens": 2},
}

# Of chat and of completions: those that are refused, and a few that look like it.
BAD: dict[str, Fields] = {
    "model": {"model": "no-such-model"},
    "no_model": {"model": None},
    "number_as_model": {"model": 5},
    "no_tokens": {"max_tokens": 0},
    "negative_tokens": {"max_tokens": -1},
    "too_many_tokens": {"max_tokens": 100_000},
    "text_as_tokens": {"max_tokens": "many"},
    "negative_temperature": {"temperature": -1},
    "text_as_temperature": {"temperature": "hot"},
    "top_p": {"top_p": 7},
    "top_k": {"top_k": -7},
    "min_p": {"min_p": 2},
    "presence": {"presence_penalty": 3},
    "frequency": {"frequency_penalty": -3},
    "repetition": {"repetition_penalty": 0},
    "n": {"n": 0},
    "two_greedy": {"n": 2},
    "many": {"n": 20_000},
    "bias": {"logit_bias": {"1000000": 1}},
    "bias_key": {"logit_bias": {"word": 1}},
    "stop": {"stop": 5},
    "empty_stop": {"stop": ""},
    "stream": {"stream": "perhaps"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "regex": {"structured_outputs": {"regex": "("}},
    "two_forms": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "no_choices": {"structured_outputs": {"choice": []}},
    "response_format": {"response_format": {"type": "yaml"}},
    "no_schema": {"response_format": {"type": "json_schema"}},
    "min_tokens": {"min_tokens": 50, "max_tokens": 4},
    "allowed_tokens": {"allowed_token_ids": []},
    "truncated": {"truncate_prompt_tokens": 100_000},
    "prompt_logprobs_streamed": {"prompt_logprobs": 1, "stream": True},
    "priority": {"priority": 3},
    "seed": {"seed": "x"},
    "beams": {"use_beam_search": True, "n": 2},
}
BAD_CHATS: dict[str, Fields] = {
    "messages": {"messages": "hello"},
    "no_messages": {"messages": None},
    "empty_messages": {"messages": []},
    "role": {"messages": [{"role": "nobody", "content": "x"}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            }
        ]
    },
    "long": {"messages": [{"role": "user", "content": "word " * 1500}]},
    "long_with_tokens": {
        "messages": [{"role": "user", "content": "word " * 1000}],
        "max_tokens": 500,
    },
    "top_logprobs": {"logprobs": True, "top_logprobs": 1000},
    "top_without_logprobs": {"top_logprobs": 2},
    "tool_choice": {"tool_choice": "required"},
    "unknown_tool": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "none"}},
    },
    "tools": {"tools": [{"type": "function"}]},
    "template": {"chat_template": "{{ nothing"},
    "quoted_choice": {"structured_outputs": {"choice": ['"\n']}},
    "both_prompts": {"add_generation_prompt": True, "continue_final_message": True},
}
BAD_TEXTS: dict[str, Fields] = {
    "no_prompt": {"prompt": None},
    "empty_prompt": {"prompt": ""},
    "empty_ids": {"prompt": []},
    "number_as_prompt": {"prompt": 7},
    "unknown_id": {"prompt": [10**6]},
    "negative_id": {"prompt": [-1]},
    "long": {"prompt": "word " * 1500},
    "logprobs": {"logprobs": 1000},
    "embeds": {"prompt": None, "prompt_embeds": "AAAA"},
    "suffix": {"suffix": "The end."},
}

RESPONSE: dict[str, Fields] = {
    "text": {},
    "seeded": {**SEEDED, "top_p": 0.9, "top_k": 10},
    "items": {"input": [{"role": "user", "content": "Say hello."}]},
    "pieces": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}]
    },
    "instructions": {"instructions": "Be terse.", "metadata": {"a": "b"}},
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
        "max_output_tokens": 14,
    },
    "tools": {
        "tools": [{"type": "function", "name": "clock", "parameters": NOTHING}],
        "tool_choice": "required",
        "max_output_tokens": 40,
    },
    "tools_auto": {"tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "ended": {"logit_bias": {"2": 100}},
    "stop": {"stop": "a", "max_output_tokens": 14},
}
BAD_RESPONSES: dict[str, Fields] = {
    "model": {"model": "no-such-model"},
    "no_input": {"input": None},
    "temperature": {"temperature": -1},
    "negative_tokens": {"max_output_tokens": -1},
    "long": {"input": "word " * 1500},
    "previous": {"previous_response_id": "resp_none"},
    "previous_no_id": {"previous_response_id": "none"},
    "background": {"background": True, "store": False},
    "tool_choice": {"tool_choice": {"type": "function", "name": "none"}},
}
MESSAGE: dict[str, Fields] = {
    "text": {},
    "system": {"system": "Be terse."},
    "pieces": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "stop": {"stop_sequences": ["a", "."], "max_tokens": 14},
    "filters": {"top_k": 1, "top_p": 0.5, "temperature": 1.0},
    "tools": {
        "tools": [{"name": "clock", "input_schema": NOTHING}],
        "tool_choice": {"type": "any"},
        "max_tokens": 40,
    },
    "tools_auto": {
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
    },
}
BAD_MESSAGES: dict[str, Fields] = {
    "model": {"model": "no-such-model"},
    "no_tokens": {"max_tokens": 0},
    "messages": {"messages": "hello"},
    "temperature": {"temperature": -1},
    "long": {"messages": [{"role": "user", "content": "word " * 1500}]},
}
TOKENS: dict[str, Fields] = {
    "text": {"prompt": "Hello there, Grüße 🙂"},
    "strings": {"prompt": "Hello there", "return_token_strs": True},
    "special": {"prompt": "<|im_start|>user", "add_special_tokens": False},
    "chat": {"messages": HELLO},
    "chat_tools": {"messages": HELLO, "tools": [WEATHER], "add_generation_prompt": False},
    "nothing": {},
    "model": {"model": "no-such-model", "prompt": "x"},
    "number": {"prompt": 5},
    "empty": {"prompt": ""},
}
UNTOKENS: dict[str, Fields] = {
    "some": {"tokens": [28, 253, 30, 1, 2]},
    "none": {"tokens": []},
    "unknown": {"tokens": [10**6]},
    "negative": {"tokens": [-1]},
    "words": {"tokens": ["a"]},
    "model": {"model": "no-such-model", "tokens": [1]},
}
OTHERS: dict[str, tuple[str, Fields]] = {
    "embeddings": ("/v1/embeddings", {"input": "Hello"}),
    "embeddings_list": ("/v1/embeddings", {"input": ["Hello", "there"]}),
    "count": (f"{MESSAGES}/count_tokens", {"messages": HELLO, "system": "Be terse."}),
    "render-chat": ("/v1/chat/completions/render", {"messages": HELLO, "max_tokens": 8}),
    "render-text": ("/v1/completions/render", {"prompt": [STORY, "Hello"], "max_tokens": 8}),
    "render-message": ("/v1/messages/render", {"messages": HELLO, "max_tokens": 8}),
}
_PAIR = {"query": "Hello", "queries": "Hello", "documents": ["there"]}
_TEXTS = {"input": "Hello", "texts": ["Hello"]}
OF_OTHER_MODELS = {
    f"other{path}": Case(f"other{path}", path, {"model": HOT, **_PAIR, **_TEXTS})
    for path, endpoint in ENDPOINTS.items()
    if endpoint.is_form or (endpoint.computes and not endpoint.generates)
}
"""One for each endpoint that takes another model than the platform's."""


def _cases() -> Iterator[Case]:
    chat = {"model": HOT, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    text = {"model": HOT, "prompt": STORY, "max_tokens": 8, "temperature": 0}
    response = {"model": HOT, "input": "Say hello.", "max_output_tokens": 8, "temperature": 0}
    message = {"model": HOT, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    model = {"model": HOT}
    # Schemas are asked for as a user would.
    asked = {"json", "json_object", "json_schema"}
    yield from _both("chat", CHAT, chat, {k: v for k, v in GENERATION.items() if k not in asked})
    yield from _both(
        "chat", CHAT, {**chat, "messages": JSON_QUESTION}, {k: GENERATION[k] for k in sorted(asked)}
    )
    yield from _both("text", COMPLETIONS, text, GENERATION)
    yield from _both("chat", CHAT, chat, CHATS)
    yield from _both("text", COMPLETIONS, text, TEXTS)
    for name, path, base in (
        ("chat", CHAT, {**chat, "messages": BRIEF}),
        ("text", COMPLETIONS, text),
    ):
        yield from _each(f"{name}-stream", path, {**base, "stream": True}, STREAM_OPTIONS)
        yield from _each(name, path, base, WHOLE)
        yield from _each(f"bad-{name}", path, base, BAD)
    yield from _each("bad-chat", CHAT, chat, BAD_CHATS)
    yield from _each("bad-text", COMPLETIONS, text, BAD_TEXTS)
    yield from _both("response", RESPONSES, response, RESPONSE)
    yield from _each("bad-response", RESPONSES, response, BAD_RESPONSES)
    yield from _both("message", MESSAGES, message, MESSAGE)
    yield from _each("bad-message", MESSAGES, message, BAD_MESSAGES)
    yield from _each("tokenize", TOKENIZE, model, TOKENS)
    yield from _each("detokenize", DETOKENIZE, model, UNTOKENS)
    for name, (path, fields) in OTHERS.items():
        yield Case(name, path, {**model, **fields})
    yield from OF_OTHER_MODELS.values()


def _both(kind: str, path: str, base: Fields, table: Mapping[str, Fields]) -> Iterator[Case]:
    """Each whole and streamed."""
    yield from _each(kind, path, base, table)
    yield from _each(f"{kind}-stream", path, {**base, "stream": True}, table)


def _each(kind: str, path: str, base: Fields, table: Mapping[str, Fields]) -> Iterator[Case]:
    for name, fields in table.items():
        body = {**base, **fields}
        if path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
            body["cache_salt"] = f"{kind}-{name}"
        yield Case(f"{kind}-{name}", path, body)


CASES = tuple(_cases())
