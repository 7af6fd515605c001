"""Items of a conversation on which vLLM would fail are refused before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def of(items: Any, path: str = RESPONSES) -> EngineRequest:
    return EngineRequest.of(path, json.dumps({"model": "m", "input": items}).encode())


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
    with pytest.raises(BadRequest) as refused:
        of([USER, item])
    assert refused.value.param == "input[1]"
    with pytest.raises(BadRequest):
        EngineRequest.of_fields(RESPONSES, {"input": [item]})


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
