"""Bodies are read as RFC 8259 says, and large ones cost little whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.client_body import (
    MOST_OTHER_BYTES,
    SMALL_BYTES,
    TEXTS,
    read_body,
)

NAMES = st.sampled_from(["model", "n", "tools", "messages", "prompt", "other"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(NAMES, VALUES), st.booleans(), st.sampled_from([None, 2]))
def test_a_small_body_says_what_it_says_to_the_engine(
    fields: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    try:
        body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return
    assert read_body(body) == (json.loads(body), {})


@given(st.dictionaries(NAMES, VALUES), st.booleans())
def test_of_a_large_body_all_but_texts_are_the_same(fields: dict[str, Any], first: bool) -> None:
    padding = {"prompt": "x" * SMALL_BYTES}
    body = json.dumps({**padding, **fields} if first else {**fields, **padding}).encode()
    if len(body) <= SMALL_BYTES:
        return
    read, texts = read_body(body)
    whole = json.loads(body)
    assert read == {k: v for k, v in whole.items() if k not in TEXTS}
    assert {k: json.loads(v) for k, v in texts.items()} == {
        k: v for k, v in whole.items() if k in TEXTS
    }


BROKEN = [
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": -Infinity}',
    b'{"temperature": 1,}',
    b'{"user": "\x00"}',
    b'{"user": "\xff"}',
    b'{"user": "\\ud800"}',
    b"\xef\xbb\xbf{}",
    '{"a": 1}'.encode("utf-16"),
    b"{} {}",
    b"[" * 100_000,
    b'{"user":' * 100_000,
    b"[]",
    b"",
]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:24]))
def test_what_is_no_json_is_refused_in_large_bodies_as_in_small(body: bytes, large: bool) -> None:
    if large:
        padding = b'{"prompt":"' + b"x" * SMALL_BYTES + b'",'
        body = padding + body[1:] if body.startswith(b"{") else body + b" " * SMALL_BYTES
    with pytest.raises(BadRequest):
        read_body(body)


SIZE = 8 * 2**20 - 2**15
NASTY: dict[str, bytes] = {
    "empty lists": b'{"messages":[' + b"[]," * (SIZE // 3) + b"[]]}",
    "empty objects": b'{"messages":[' + b"{}," * (SIZE // 3) + b"{}]}",
    "lists in an unknown field": b'{"x":[' + b"[]," * (SIZE // 3) + b"[]]}",
    "lists in a known field": b'{"tools":[' + b"[]," * (SIZE // 3) + b"[]]}",
    "keys": b"{" + b",".join(b'"k%06d":0' % number for number in range(690_000)) + b"}",
    "numbers": b'{"x":[' + b"5," * (SIZE // 2) + b"5]}",
    "one number": b'{"n":' + b"9" * SIZE + b"}",
    "depth": b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b" " * SIZE + b"}",
}


@pytest.mark.parametrize("name", NASTY)
def test_a_large_body_builds_no_more_than_a_small_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    built: list[int] = []
    decode = msgspec.json.decode

    def counted(raw: Any, **kind: Any) -> Any:
        built.append(len(bytes(raw)))
        return decode(raw, **kind)

    monkeypatch.setattr(msgspec.json, "decode", counted)
    try:
        fields, texts = read_body(NASTY[name])
    except BadRequest:
        pass
    else:
        assert name in ("empty lists", "empty objects")
        assert (fields, list(texts)) == ({}, ["messages"])
    assert sum(built) <= MOST_OTHER_BYTES
