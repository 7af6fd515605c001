"""Log probabilities are vLLM's own to the byte, and halt the event loop for a slice only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from loomserve.platform.base import heap
from tests.unit.platform.front_end.engine.answering import Answering

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BESIDE = 63
ENTRIES = 2**15
TOKENS = ENTRIES // (BESIDE + 1)
_CREATED = re.compile(rb'"created":\d+|"chatcmpl-[^"]*"|"cmpl-[^"]*"')
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
    "chats_prompt": (
        CHAT,
        {"messages": [{"role": "user", "content": _LONG}], "prompt_logprobs": BESIDE},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Answering]:
    tokens = [300 + number % 1000 for number in range(TOKENS)]
    made = Answering(options={"max_logprobs": BESIDE}, tokens=tokens, at_once=1)
    # As in a gateway: else a collection passes over all that vLLM's import has left.
    heap.keep_heap()
    yield made
    made.close()


@pytest.mark.parametrize("name", ASKED)
def test_they_are_vllms_and_halt_nobody(server: Answering, name: str) -> None:
    path, asked = ASKED[name]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **asked}
    if path == TEXT:
        del body["messages"]
    ours = server.answer(path, body, ours=True)
    halt_s = server.halt_s
    theirs = server.answer(path, body, ours=False)
    assert _CREATED.sub(b"", ours) == _CREATED.sub(b"", theirs)
    # What the loop's thread computed in one turn.
    assert halt_s < 0.2
