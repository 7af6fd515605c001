"""What routers are told of a prompt's beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loomserve.platform.requests.client_body import SMALL_BYTES
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.prefix import prefix_keys
from loomserve.routers.block_keys import BLOCK_BYTES

CHAT = "/v1/chat/completions"
STORY = "Once upon a time there was a weaver. " * 100
SAID = {"role": "user", "content": STORY}
HEARD = {"role": "assistant", "content": "Go on."}


def keys(path: str = CHAT, **fields: Any) -> tuple[bytes, ...]:
    return prefix_keys(EngineRequest.of(path, json.dumps(fields).encode()))


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return len(set(one) & set(other))


def test_the_next_turn_of_a_conversation_begins_with_the_last_one() -> None:
    first = keys(model="m", messages=[SAID])
    second = keys(messages=[SAID, HEARD, SAID], temperature=0.5, model="m")
    assert len(first) == len(STORY) // BLOCK_BYTES
    assert common(first, second) == len(first)
    assert len(second) > len(first)


def test_a_large_body_begins_as_a_small_one() -> None:
    small = keys(model="m", messages=[SAID])
    large = keys(model="m", messages=[SAID, {"role": "user", "content": "x" * SMALL_BYTES}])
    assert common(small, large) == len(small)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": STORY}),
        ("/v1/completions", {"prompt": list(range(1000))}),
        ("/v1/completions", {"prompt": [STORY, STORY]}),
        ("/v1/responses", {"instructions": STORY, "input": "Begin."}),
        ("/v1/responses", {"input": [SAID]}),
        ("/v1/messages", {"system": STORY, "messages": [HEARD]}),
        ("/v1/embeddings", {"input": STORY}),
    ],
)
def test_prompts_of_every_endpoint_have_keys(path: str, fields: dict[str, Any]) -> None:
    found = keys(path, model="m", **fields)
    assert len(found) > 5
    assert keys(path, model="m", **fields) == found
    assert not common(found, keys(path, model="adapter", **fields))
    assert not common(found, keys(path, model="m", cache_salt="mine", **fields))


def test_what_the_model_reads_first_comes_first() -> None:
    one = keys("/v1/messages", model="m", messages=[HEARD], system=STORY)
    other = keys("/v1/messages", model="m", messages=[SAID], system=STORY)
    assert common(one, other) == len(STORY) // BLOCK_BYTES


def test_tenants_share_no_key_with_the_same_prompt_and_salt() -> None:
    body = json.dumps({"model": "m", "messages": [SAID], "cache_salt": "the same"}).encode()
    alice, bob, nobody = (
        prefix_keys(request)
        for request in (
            EngineRequest.of(CHAT, body).isolated("alice"),
            EngineRequest.of(CHAT, body).isolated("bob"),
            EngineRequest.of(CHAT, body),
        )
    )
    assert not common(alice, bob)
    assert not common(alice, nobody)
    assert len(alice) == len(bob) == len(nobody) > 5


@pytest.mark.parametrize("fields", [{}, {"model": 7, "messages": None}, {"prompt": "short"}])
def test_a_request_without_much_of_a_prompt_has_none(fields: dict[str, Any]) -> None:
    assert keys(**fields) == ()


def test_a_request_of_the_platforms_own_has_keys() -> None:
    assert prefix_keys(EngineRequest(CHAT, {"model": "m", "messages": [SAID]}))
