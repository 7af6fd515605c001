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
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def of(items: Any, path: str = RESPONSES, padding: str = "") -> None:
    fields = {"model": "m", "input": items, "instructions": padding}
    EngineRequest.of(path, json.dumps(fields).encode()).check_conversation(())


@pytest.mark.parametrize(
    "item",
    [
        {},
        7,
        None,
        "hello",
        {"content": "no role"},
        {"role": 3, "content": "x"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": ["x"]},
        {"type": "web_search_call", "id": "w"},
        {"type": ["function_call"]},
        {"type": "function_call", "call_id": "c"},
        {**CALL, "arguments": {}},
        {"type": "function_call_output", "output": "no call"},
        {"type": "reasoning", "id": "r"},
        {"type": "reasoning", "id": "r", "summary": [{"text": "t", "type": 0.5}]},
        {**CALL, "id": 7},
    ],
)
def test_what_is_no_item_is_refused_by_its_place(item: Any) -> None:
    for padding in ("", "x" * SMALL_BYTES):
        with pytest.raises(BadRequest) as refused:
            of([USER, item], padding=padding)
        assert refused.value.param == "input[1]"
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
