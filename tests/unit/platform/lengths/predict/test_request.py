"""From a client's request to a predictor's question, and from an answer's bytes to its length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.lengths.predict.request import query_of
from loomserve.platform.lengths.service import counts_once
from loomserve.platform.requests.answer_length import AnswerLength


def words(text: str) -> int:
    return len(text.split())


PARTS = [{"type": "text", "text": "two words"}, {"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("request_", "query"),
    [
        ({"prompt": "say this", "max_tokens": 9}, LengthQuery("", "say this", 2, 9)),
        ({"prompt": ["say this"]}, LengthQuery("", "say this", 2)),
        (
            {
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": PARTS},
                    {"role": "assistant", "content": None},
                    {"role": "user", "content": "and now"},
                ],
                "max_tokens": 5,
                "max_completion_tokens": 7,
            },
            LengthQuery("be brief", "two words\nand now", 6, 7),
        ),
        (
            {"system": PARTS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
            LengthQuery("two words", "hi", 3, 4),
        ),
        (
            {"instructions": "be brief", "input": "hi there", "max_output_tokens": 3},
            LengthQuery("be brief", "hi there", 4, 3),
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                ]
            },
            LengthQuery("be brief", "hi", 3),
        ),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": ["one", "two"]}, None),
        ({"messages": []}, None),
        ({}, None),
    ],
)
def test_every_endpoints_request_becomes_a_question(
    request_: dict[str, Any], query: LengthQuery | None
) -> None:
    assert query_of(request_, words) == query


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "input", "system", "max_tokens", "instructions"]),
        JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=2),
    )
)
def test_no_nonsense_of_a_clients_stops_a_request(request_: dict[str, Any]) -> None:
    query = query_of(request_, words)
    assert query is None or query.max_tokens is None or query.max_tokens > 0


def test_long_texts_are_counted_by_their_beginning() -> None:
    asked: list[int] = []

    def count(text: str) -> int:
        asked.append(len(text))
        return len(text) // 4

    query = query_of({"prompt": "abcd" * 100_000}, count)
    assert query is not None
    assert query.input_tokens == 100_000
    assert max(asked) < 10_000


CHAT = {
    "id": "1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": 'a "completion_tokens":7 b'},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 45, "completion_tokens": 42},
    "prompt_logprobs": None,
}


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


STREAM = (
    b"".join(event({"choices": [{"index": 0, "delta": {"content": "x"}}]}) for _ in range(200))
    + event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]})
    + event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 201}})
    + b"data: [DONE]\n\n"
)
ANTHROPIC = {
    "type": "message",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 12},
}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (json.dumps(CHAT).encode(), 42),
        (json.dumps(CHAT, separators=(",", ":")).encode(), 42),
        (json.dumps(CHAT).replace('"stop"', '"length"').encode(), None),
        (json.dumps(CHAT).replace('"usage"', '"other"').encode(), 42),
        (STREAM, 201),
        (STREAM.replace(b'"finish_reason": "stop"', b'"finish_reason": "length"'), None),
        (STREAM[: len(STREAM) // 2], None),
        (json.dumps(ANTHROPIC).encode(), 12),
        (json.dumps(ANTHROPIC).replace("end_turn", "max_tokens").encode(), None),
        (b'{"choices": [{"finish_reason": "stop", "text": "\\"completion_tokens\\":7"}]}', None),
        (b"", None),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_an_answers_length_is_read_from_its_end_however_it_was_cut_into_pieces(
    body: bytes, tokens: int | None, size: int
) -> None:
    length = AnswerLength()
    for at in range(0, len(body), size):
        length.feed(body[at : at + size])
    assert length.tokens == tokens


def test_what_an_answer_says_does_not_pass_for_its_length() -> None:
    text = json.dumps(json.dumps(CHAT))  # an answer that quotes another one
    length = AnswerLength()
    length.feed(b'{"choices": [{"text": ' + text.encode() + b', "finish_reason": "length"}]}')
    assert length.tokens is None


@pytest.mark.parametrize(
    ("request_", "once"), [({}, True), ({"n": 1}, True), ({"n": 2}, False), ({"best_of": 3}, False)]
)
def test_several_answers_have_no_single_length(request_: dict[str, Any], once: bool) -> None:
    assert counts_once(request_) is once
