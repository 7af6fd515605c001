"""What would change an answer and is not obeyed is refused, by its name and with what to send."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.policy.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    PASSED_ON,
    RESPONSES,
    TEXT_ENDPOINTS,
    WITHOUT_EFFECT,
)
from loomserve.platform.requests.policy.obeyed import check_obeyed
from loomserve.platform.requests.policy.refused_fields import REFUSED, REFUSED_EMBEDDINGS

PAGE = Path(__file__).parents[5] / "docs/requests.md"
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


def refused(path: str, fields: dict[str, Any]) -> BadRequest:
    """The error of a request, which a line of a batch and a padded one have, too."""
    found = set()
    body = json.dumps(fields)
    for text in (body, body + " " * 2**18):
        with pytest.raises(BadRequest) as error:
            EngineRequest.of(path, text.encode())
        found.add((str(error.value), error.value.param))
    with pytest.raises(BadRequest) as error:
        EngineRequest.of_fields(path, fields)
    found.add((str(error.value), error.value.param))
    assert len(found) == 1
    return error.value


@pytest.mark.parametrize("path", TEXT_ENDPOINTS)
def test_fields_of_other_servers_are_refused_by_name(path: str) -> None:
    for name, known in REFUSED.items():
        if path == MESSAGES and name in ("thinking", "context_management"):
            continue
        error = refused(path, {"model": "m", name: {"a": "b"}})
        assert (error.status, error.param) == (400, name)
        assert known.instead in str(error)


@pytest.mark.parametrize("name", ["web_search_options", "guided_json", "json_schema", "audio"])
def test_an_empty_object_that_asks_for_something_is_refused(name: str) -> None:
    assert refused(CHAT, {"model": "m", name: {}}).param == name


def test_fields_of_other_servers_for_embeddings_are_refused() -> None:
    for name in REFUSED_EMBEDDINGS:
        assert refused(EMBEDDINGS, {"input": "a", name: "b"}).param == name


@pytest.mark.parametrize(
    ("path", "fields", "param", "instead"),
    [
        (CHAT, {"guided_choice": ["red"]}, "guided_choice", "structured_outputs.choice"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "tools"),
        (CHAT, {"function_call": "auto"}, "function_call", "tool_choice"),
        (CHAT, {"best_of": 3}, "best_of", "n asks"),
        (CHAT, {"best_of": 2, "n": 1}, "best_of", "n asks"),
        (CHAT, {"format": "json"}, "format", "response_format"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "text"),
        (CHAT, {"think": False}, "think", "chat_template_kwargs"),
        (CHAT, {"do_sample": False}, "do_sample", "temperature 0"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens", "max_completion_tokens"),
        (CHAT, {"system": "be brief"}, "system", "role system"),
        (CHAT, {"stop_sequences": ["a"]}, "stop_sequences", "use stop"),
        (CHAT, {"reasoning": {"effort": "low"}}, "reasoning", "reasoning_effort"),
        (CHAT, {"text": {"format": {}}}, "text", "response_format"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]", "describe a function"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "functions only"),
        (COMPLETIONS, {"messages": [1]}, "messages", "use prompt"),
        (COMPLETIONS, {"max_completion_tokens": 4}, "max_completion_tokens", "max_tokens"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs", "use logprobs"),
        (COMPLETIONS, {"tools": [FUNCTION]}, "tools", CHAT),
        (RESPONSES, {"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        (RESPONSES, {"messages": [{}]}, "messages", "use input"),
        (RESPONSES, {"n": 2}, "n", CHAT),
        (RESPONSES, {"response_format": {"type": "text"}}, "response_format", "text.format"),
        (RESPONSES, {"store": True}, "store", "store: false"),
        (RESPONSES, {"background": True}, "background", "/v1/batches"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt", "use input"),
        (RESPONSES, {"conversation": "c"}, "conversation", "whole conversation"),
        (RESPONSES, {"tools": [{"type": "mcp"}]}, "tools[0]", "'mcp'"),
        (RESPONSES, {"tools": [FUNCTION, {"type": "file_search"}]}, "tools[1]", "file_search"),
        (RESPONSES, {"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "functions"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "prompt"),
        (MESSAGES, {"seed": 0}, "seed", CHAT),
        (MESSAGES, {"stop": "a"}, "stop", "stop_sequences"),
        (MESSAGES, {"priority": 3}, "priority", CHAT),
        (MESSAGES, {"tools": [{"type": "web_search_20250305"}]}, "tools[0]", "function"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice", "give tools"),
        (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "functions"),
        (CHAT, {"use_beam_search": True, "n": 2, "stop": "a"}, "stop", "beam search"),
        (CHAT, {"use_beam_search": True, "seed": 0}, "seed", "beam search"),
        (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
         "response_format.schema", "json_schema"),
        (COMPLETIONS, {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
         "response_format.json_schema", "json_schema"),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": {"a": 1}}}},
         "text.format.schema", "json_schema"),
        (RESPONSES, {"top_logprobs": 2}, "top_logprobs", "include"),
        (CHAT, {"messages": [{}, {"role": "assistant", "content": "a", "prefix": True}]},
         "messages[].prefix", "continue_final_message"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "partial": True}]},
         "messages[].partial", "continue_final_message"),
        (MESSAGES, {"output_format": {"type": "json_schema"}}, "output_format", "output_config"),
    ],
)  # fmt: skip
def test_what_would_not_be_obeyed_is_refused(
    path: str, fields: dict[str, Any], param: str, instead: str
) -> None:
    error = refused(path, fields)
    assert (error.status, error.param) == (400, param)
    assert instead in str(error)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, dict.fromkeys(REFUSED)),
        (CHAT, {name: [] for name in REFUSED if name not in ("best_of", "store", "background")}),
        (CHAT, {name: value for name, known in REFUSED.items() for value in known.off}),
        (CHAT, {"best_of": 2, "n": 2}),
        (CHAT, {"modalities": ["text"], "verbosity": "medium", "store": False}),
        (CHAT, {name: "x" for name in WITHOUT_EFFECT if name != "stream_interval"
                and name != "max_tool_calls"}),
        (CHAT, {"colour": "red", "keep_alive": "5m"}),
        (CHAT, {"use_beam_search": True, "n": 2, "top_p": 1, "stop": [], "temperature": 0.5}),
        (CHAT, {"input": None, "system": "", "truncation": "disabled"}),
        (RESPONSES, {"n": 1, "min_p": 0.0, "logprobs": False, "include_reasoning": True}),
        (RESPONSES, {"store": False, "previous_response_id": None, "tools": []}),
        (RESPONSES, {"tools": [FUNCTION], "parallel_tool_calls": True}),
        (RESPONSES, {"tools": [FUNCTION], "parallel_tool_calls": False}),
        (RESPONSES, {"parallel_tool_calls": False}),
        (RESPONSES, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}, "tools": [FUNCTION]}),
        (CHAT, {"messages": [{"role": "assistant", "prefix": False}, 7]}),
        (CHAT, {"messages": [{"role": "user", "content": '{"prefix": true}'}]}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "context_management": {"edits": [1]}}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}),
        (COMPLETIONS, {"tool_choice": "none", "messages": [], "suffix": None}),
        (EMBEDDINGS, {"input": "a", "temperature": 1, "truncate": "NONE"}),
        ("/v1/rerank", {"n": "x", "guided_json": {}}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_passes(path: str, fields: dict[str, Any]) -> None:
    check_obeyed(path, fields)


def test_a_text_that_names_a_field_is_a_text() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": '"prefix": true' + "x" * 2**18}]})
    EngineRequest.of(CHAT, body.encode())


def test_a_large_body_may_have_empty_fields_as_a_small_one() -> None:
    for empty in (None, "", [], {}):
        for name in ("system", "instructions", "prompt"):
            body = json.dumps({"model": "m", name: empty}).encode()
            for padded in (body, body + b" " * 2**18):
                EngineRequest.of(CHAT, padded)


TEXT = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI's agents": (
        RESPONSES,
        {"input": TEXT, "instructions": "x", "tools": [{**FUNCTION, "strict": True}],
         "tool_choice": "auto", "parallel_tool_calls": True, "include": [], "stream": True,
         "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}},
         "truncation": "auto", "metadata": {"a": "b"}, "max_output_tokens": 9, "store": False},
    ),
    "Claude Code": (
        MESSAGES,
        {"messages": TEXT, "system": [{"type": "text", "text": "x"}], "max_tokens": 32000,
         "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stream": True,
         "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
         "temperature": 1, "output_config": {"effort": "high"},
         "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    "LangChain": (
        CHAT,
        {"messages": TEXT, "temperature": 0.7, "n": 1, "stream": True, "tools": [TOOL],
         "stream_options": {"include_usage": True}, "frequency_penalty": 0, "presence_penalty": 0,
         "top_p": 1, "logprobs": False, "user": "u", "response_format": {"type": "text"}},
    ),
    "Open WebUI": (
        CHAT,
        {"messages": TEXT, "stream": True, "max_tokens": 9, "frequency_penalty": 0.1, "seed": 3,
         "stop": ["a"], "chat_id": "c", "session_id": "s", "id": "i", "features": {}},
    ),
    "Cline": (
        CHAT,
        {"messages": TEXT, "temperature": 0, "stream": True, "max_completion_tokens": 8192,
         "stream_options": {"include_usage": True}, "reasoning_effort": "medium"},
    ),
    "Continue": (
        CHAT,
        {"messages": TEXT, "stream": True, "max_tokens": 9, "tools": [TOOL],
         "parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"}},
    ),
    "LlamaIndex": (COMPLETIONS, {"prompt": "x", "temperature": 0.1, "max_tokens": 9}),
    "LiteLLM": (EMBEDDINGS, {"input": ["a"], "encoding_format": "float", "user": "u"}),
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_usual_requests_of_clients_pass(client: str) -> None:
    path, fields = CLIENTS[client]
    EngineRequest.of(path, json.dumps({"model": "m", **fields}).encode())


def test_true_is_not_one_and_false_not_nought() -> None:
    for name, value in (("best_of", True), ("store", 0), ("typical_p", True)):
        with pytest.raises(BadRequest, match=name):
            check_obeyed(CHAT, {name: value})


@pytest.mark.parametrize(
    ("given", "enabled"), [("disabled", False), ("enabled", True), ("adaptive", True)]
)
def test_thinking_of_messages_is_passed_on_to_the_template(given: str, enabled: bool) -> None:
    body = {"model": "m", "thinking": {"type": given}, "chat_template_kwargs": {"a": 1}}
    request = EngineRequest.of(MESSAGES, json.dumps(body).encode())
    sent = json.loads(request.encoded)
    assert sent["chat_template_kwargs"] == {"a": 1, "enable_thinking": enabled}


def test_a_template_is_told_what_its_client_says_itself() -> None:
    own = {"enable_thinking": True}
    body = {"thinking": {"type": "disabled"}, "chat_template_kwargs": own}
    assert EngineRequest.of_fields(MESSAGES, body).fields["chat_template_kwargs"] == own


def test_no_field_is_both_obeyed_and_refused() -> None:
    for path in TEXT_ENDPOINTS:
        assert not PASSED_ON[path] & (REFUSED.keys() | WITHOUT_EFFECT)
    assert not PASSED_ON[EMBEDDINGS] & REFUSED_EMBEDDINGS.keys()


def test_the_page_has_each_refused_field_and_what_to_send() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    told = {(name, instead) for names, instead in rows for name in re.findall(r"`(\w+)`", names)}
    tables = (*REFUSED.items(), *REFUSED_EMBEDDINGS.items())
    assert told >= {(name, known.instead) for name, known in tables}
