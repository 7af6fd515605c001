"""What vLLM says of wrong input is short, names the field, and repeats nothing of the input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loomserve.platform.http.engine_errors import normalise
from loomserve.platform.requests.policy.fields import PASSED_ON, WITHOUT_EFFECT
from tests.unit.platform.front_end.engine.server import MAX_MODEL_LEN, TAKEN, Server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hello"}
SECRET = "a text of the client's own"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def refused(server: Server, path: str, fields: Any) -> tuple[str, str | None]:
    status, body = server.ask(path, {"model": "m", **fields})
    assert status == 400, body
    assert len(body) < 1000
    error = normalise(body, status, {"model", *fields})["error"]
    assert SECRET not in error["message"]
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": None}]},
         "messages[1].content"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": {"a": SECRET}}]},
         "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": [SECRET]}]}]},
         "messages[0].content[0].text"),
        (CHAT, {"messages": [{}] * 2000}, "messages[0].role"),
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {"messages": [USER], "logprobs": SECRET}, "logprobs"),
        (CHAT, {"messages": [USER], "tools": [SECRET]}, "tools[0]"),
        (CHAT, {"messages": [USER], "top_logprobs": -5, "logprobs": True}, "top_logprobs"),
        (MESSAGES, {"messages": [USER]}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": SECRET}]}], "max_tokens": 1},
         "messages[0].content[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": {}}] * 800}, "input[0].content"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": 3,
                                "arguments": SECRET}]}, "input[0].name"),
        ("/v1/completions", {"prompt": [{"a": SECRET}] * 100}, "prompt[0]"),
        ("/v1/tokenize", {"prompt": 5}, "prompt"),
        ("/v1/detokenize", {"tokens": [SECRET] * 100}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [2**40]}, "tokens[0]"),
        (CHAT, {"messages": [USER, {"role": "nobody", "content": "x"}]}, "messages[1].role"),
        ("/v1/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions/render", {"messages": [{"role": "nobody", "content": "x"}]},
         "messages[0].role"),
        (CHAT, {"messages": [USER], "min_p": 2}, "min_p"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [USER], "chat_template": "{{ x }}"}, "chat_template"),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": [USER], "structured_outputs": {"choice": []}}, "structured_outputs"),
        (CHAT, {"messages": [USER], "max_tokens": MAX_MODEL_LEN + 1}, "max_tokens"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions/render", {"prompt": [10**6]}, "prompt"),
        (RESPONSES, {"input": [{"type": "message", "role": "nobody", "content": "x"}]},
         "input[0].role"),
        (RESPONSES, {"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 2, "stop_sequences": [""]},
         "stop_sequences"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_the_first_fault_is_told_by_its_path(
    server: Server, path: str, fields: Any, param: str
) -> None:
    message, told = refused(server, path, fields)
    assert told == param
    assert len(message) <= 350


def test_several_faults_are_told_at_once(server: Server) -> None:
    names = ("documents", "min_p", "stop", "temperature", "top_p", "length_penalty", "user")
    wrong: dict[str, Any] = {name: {} for name in names}
    message, _ = refused(server, CHAT, {"messages": [USER], **wrong})
    assert message.count(": ") == 5
    assert message.endswith("and 2 more")


def test_sound_requests_reach_an_engine(server: Server) -> None:
    part = {"type": "text", "text": "Hello"}
    for content in ("Hello", [part], [part] * 20):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
        status, body = server.ask(CHAT, {"model": "m", "messages": messages})
        assert status == TAKEN, body
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    status, body = server.ask(RESPONSES, {"model": "m", "input": [said, call]})
    assert status == TAKEN, body


def test_what_vllm_refuses_with_a_value_does_not_repeat_it(server: Server) -> None:
    fields = {"messages": [USER], "logit_bias": {"1": 1.0}, "top_k": -7}
    status, body = server.ask(CHAT, {"model": "m", **fields})
    assert status == 400
    assert b"value=" not in json.loads(body)["error"]["message"].encode()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"model": "/a" * 1_500, "messages": [USER]}),
        (MESSAGES, {"model": "/a" * 1_500, "messages": [USER], "max_tokens": 1}),
        (CHAT, {"messages": [USER], "tools": [{}], "tool_choice": "/a" * 1_500}),
    ],
)
def test_what_vllm_repeats_of_the_input_is_short_and_read_soon(
    server: Server, path: str, fields: Any
) -> None:
    began = time.process_time()
    status, body = server.ask(path, {"model": "m", **fields})
    took_s = time.process_time() - began
    assert status in (400, 404)
    assert len(body) < 1500
    # vLLM takes 3 s for these, and the square of that for ten times as much.
    assert took_s < 0.5


@pytest.mark.parametrize("name", ["messages", "conversation", "tokenizer", "self"])
def test_a_name_that_is_the_renderers_own_is_refused_in_words(server: Server, name: str) -> None:
    said, _ = refused(server, CHAT, {"messages": [USER], "chat_template_kwargs": {name: 1}})
    assert "a name that is not its own" in said


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES, MESSAGES])
def test_a_field_that_is_null_is_not_there(server: Server, path: str) -> None:
    usual = {"model": "m", "messages": [USER], "prompt": "x", "input": "x", "max_tokens": 5}
    asked = {key: each for key, each in usual.items() if key in PASSED_ON[path]}
    for name in sorted((PASSED_ON[path] | WITHOUT_EFFECT) - usual.keys()):
        status, body = server.ask(path, {name: None, **asked})
        assert status == TAKEN, (name, body)


def test_a_role_that_the_template_names_passes(server: Server) -> None:
    template = "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}"
    other = Server(chat_template=template + "{% endfor %}")
    said = {"model": "m", "messages": [{"role": "critic", "content": "x"}]}
    try:
        assert other.ask(CHAT, said)[0] == TAKEN
    finally:
        other.close()
    assert server.ask(CHAT, said)[0] == 400


def test_documents_are_refused_that_the_template_does_not_read(server: Server) -> None:
    asked = {"messages": [USER], "documents": [{"title": "a", "text": "b"}]}
    said, param = refused(server, CHAT, asked)
    assert param == "documents"
    assert "takes no documents" in said
    other = Server(chat_template="{% for d in documents %}{{ d.text }}{% endfor %}")
    try:
        assert other.ask(CHAT, {"model": "m", **asked})[0] == TAKEN
        assert server.ask(CHAT, {"model": "m", **asked, "documents": []})[0] == TAKEN
    finally:
        other.close()


@pytest.mark.parametrize("depth", range(100, 1000, 90))
def test_what_is_nested_deeply_is_no_error_of_ours(server: Server, depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    deep = json.loads(text)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    used = {"type": "tool_use", "id": "c", "name": "f", "input": deep}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    for path, fields in (
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": deep}),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [used]}, USER]}),
        (RESPONSES, {"input": [{**USER}, made]}),
    ):
        sent = {"model": "m", **fields, **({"max_tokens": 5} if path == MESSAGES else {})}
        status, body = server.ask(path, sent)
        assert status in (TAKEN, 400), body
        assert status == TAKEN or "too deeply" in json.loads(body)["error"]["message"], body
