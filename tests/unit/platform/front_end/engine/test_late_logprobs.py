"""Log probabilities are vLLM's own to the byte, and halt the event loop for a slice only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from loomserve.platform.base import heap
from tests.unit.platform.front_end.engine.answering import Answering

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BESIDE = 63
ENTRIES = 2**15
TOKENS = ENTRIES // (BESIDE + 1)
MOST_BESIDE = 20
"""In a response."""
_CREATED = re.compile(rb'"created(_at)?":\d+|"(chatcmpl|cmpl|resp|msg)[-_][^"]*"')
# Of 12 tokens each.
_LONG = "hello world " * 40
_SHORT = "hello world " * 20
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "few": (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    "chat": (CHAT, {"logprobs": True, "top_logprobs": BESIDE, "max_tokens": TOKENS}),
    "chats": (CHAT, {"logprobs": True, "top_logprobs": BESIDE, "max_tokens": 40, "n": 3}),
    "text": (TEXT, {"prompt": "x", "logprobs": BESIDE, "max_tokens": TOKENS}),
    "texts": (TEXT, {"prompt": ["x", "y"], "n": 2, "logprobs": BESIDE, "max_tokens": 30}),
    "prompt": (TEXT, {"prompt": _LONG, "prompt_logprobs": BESIDE, "max_tokens": 2}),
    "prompts": (
        TEXT,
        {"prompt": [_SHORT, "x", _SHORT], "n": 2, "prompt_logprobs": BESIDE, "max_tokens": 2},
    ),
    "echo": (TEXT, {"prompt": _SHORT, "logprobs": BESIDE, "max_tokens": 20, "echo": True}),
    "echoes": (
        TEXT,
        {"prompt": [_SHORT, "x y"], "n": 2, "logprobs": BESIDE, "max_tokens": 2, "echo": True},
    ),
    "only_echo": (TEXT, {"prompt": _SHORT, "logprobs": BESIDE, "max_tokens": 0, "echo": True}),
    "response": (
        RESPONSE,
        {"max_output_tokens": ENTRIES // (MOST_BESIDE + 1)},
    ),
    "chats_prompt": (
        CHAT,
        {"messages": [{"role": "user", "content": _LONG}], "prompt_logprobs": BESIDE},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Answering]:
    tokens = [300 + number % 1000 for number in range(ENTRIES // (MOST_BESIDE + 1))]
    made = Answering(options={"max_logprobs": BESIDE}, tokens=tokens, at_once=1)
    # As in a gateway: else a collection passes over all that vLLM's import has left.
    heap.keep_heap()
    yield made
    made.close()


def body_of(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    if path == RESPONSE:
        told = ["message.output_text.logprobs"]
        return {"input": "x", "include": told, "top_logprobs": MOST_BESIDE, **asked}
    messages = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {}
    return {**messages, "max_tokens": 1, **asked}


@pytest.mark.parametrize("name", ASKED)
def test_they_are_vllms_and_halt_nobody(server: Answering, name: str) -> None:
    path, asked = ASKED[name]
    body = body_of(path, asked)
    ours = server.answer(path, body, ours=True)
    halt_s = server.halt_s
    theirs = server.answer(path, body, ours=False)
    assert _CREATED.sub(b"", ours) == _CREATED.sub(b"", theirs)
    # What the loop's thread computed in one turn.
    assert halt_s < 0.1


STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"logprobs": True, "top_logprobs": BESIDE, "max_tokens": TOKENS}),
    "text": (TEXT, {"prompt": "x", "logprobs": BESIDE, "max_tokens": TOKENS}),
    "response": (RESPONSE, {"max_output_tokens": 2**13 // (MOST_BESIDE + 1)}),
    "echoes": (
        TEXT,
        {"prompt": "hello world " * 10, "n": 8, "logprobs": BESIDE, "max_tokens": 2, "echo": True},
    ),
}


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("name", STREAMED)
def test_those_of_a_stream_halt_nobody_either(
    server: Answering, name: str, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = STREAMED[name]
    body = body_of(path, {**asked, "stream": True})
    with monkeypatch.context() as patched:
        patched.setattr(server, "is_behind", is_behind)
        ours = server.answer(path, body, ours=True)
    halt_s = server.halt_s
    theirs = server.answer(path, body, ours=False)
    assert _said(ours) == _said(theirs)
    assert halt_s < 0.1


def _said(stream: bytes) -> Any:
    """All that a stream says of each answer, however it is cut into chunks; of a response its
    last event."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    if b'"response.created"' in lines[0]:
        return _CREATED.sub(b"", lines[-1])
    said: dict[int, dict[str, list[Any]]] = {}
    for line in lines:
        for choice in json.loads(line)["choices"]:
            of_answer = said.setdefault(choice["index"], {})
            for name, values in (choice["logprobs"] or {}).items():
                of_answer.setdefault(name, []).extend(values or [])
    return said


def test_a_stream_says_when_its_prompt_has_too_many(server: Answering) -> None:
    asked = {"prompt": _SHORT, "logprobs": BESIDE, "max_tokens": 1, "echo": True, "stream": True}
    _, answer = server.ask(TEXT, {"model": "m", **asked})
    assert b"a prompt may have 128 tokens" in answer
