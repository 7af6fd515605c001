"""From a client's request to a predictor's question."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lengths.predict.prediction import LengthQuery, query_of


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
