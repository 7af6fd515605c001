"""What clients may not say, whose KV blocks they reach, and which bytes engines get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.background import BACKGROUND
from loomserve.platform.scheduling.policy.deadline import DEADLINE
from loomserve.platform.scheduling.policy.expected import EXPECTED, Expected

CHAT = "/v1/chat/completions"
TENANTS = st.text(min_size=1, max_size=5)
SALTS = st.none() | st.text(min_size=1, max_size=5)


@pytest.mark.parametrize(
    "request_",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": "x"},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)
def test_a_client_that_speaks_to_the_connector_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineRequest.of_fields(CHAT, {"model": "chat", **request_})
    assert refused.value.body()["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize(
    "request_",
    [{}, {"kv_transfer_params": None}, {"vllm_xargs": {"other": 1}}, {"vllm_xargs": "odd"}],
)
def test_any_other_request_passes(request_: dict[str, Any]) -> None:
    EngineRequest.of_fields(CHAT, {"model": "chat", **request_})


def isolate(request: dict[str, Any], tenant: str) -> Mapping[str, Any]:
    return EngineRequest(CHAT, request).isolated(tenant).fields


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_salts_are_equal_exactly_where_tenant_and_own_salt_are(
    one: str, own: str | None, other: str, others: str | None
) -> None:
    first = isolate({"model": "chat", "cache_salt": own}, one)
    second = isolate({"model": "chat", "cache_salt": others}, other)
    assert (first["cache_salt"] == second["cache_salt"]) == ((one, own) == (other, others))
    assert 0 < len(first["cache_salt"]) <= 1024
    assert first["model"] == "chat"


@given(TENANTS, SALTS, TENANTS)
def test_no_tenant_can_send_the_salt_that_another_gets(
    victim: str, own: str | None, thief: str
) -> None:
    secret = isolate({"cache_salt": own}, victim)["cache_salt"]
    assert isolate({"cache_salt": secret}, thief)["cache_salt"] != secret


@pytest.mark.parametrize("salt", ["", 7, ["a"], {"a": 1}, "x" * 1025])
def test_a_salt_that_vllm_would_refuse_is_refused(salt: object) -> None:
    with pytest.raises(BadRequest) as refused:
        isolate({"cache_salt": salt}, "alice")
    assert refused.value.param == "cache_salt"


BODY = b'{ "model":"chat", "vllm_xargs": {"own": "x"} }'


def test_what_nothing_was_added_to_is_sent_as_it_came() -> None:
    for path in (CHAT, "/v1/tokenize", "/v1/embeddings"):
        assert EngineRequest.of(path, BODY).with_hints().encoded == BODY
    embedding = EngineRequest.of("/v1/embeddings", BODY)
    assert embedding.with_hints(deadline=1.0, background=True) is embedding
    tokenised = EngineRequest.of("/v1/tokenize", BODY)
    assert tokenised.isolated("alice") is tokenised, "it needs no KV blocks"


def test_what_was_added_is_sent_after_the_clients_own() -> None:
    request = EngineRequest.of(CHAT, BODY).isolated("alice")
    hinted = request.with_hints(deadline=2.5, expected=Expected(20.0, 45.0), background=True)
    hints = {"own": "x", DEADLINE: 2.5, EXPECTED: [20.0, 45.0], BACKGROUND: 1}
    salt = request.fields["cache_salt"]
    assert (
        hinted.encoded
        == json.dumps({"model": "chat", "vllm_xargs": hints, "cache_salt": salt}).encode()
    )
    assert hinted.engine_path == CHAT


def test_the_engine_has_its_own_names_for_some_endpoints() -> None:
    assert EngineRequest("/v1/tokenize", {}).engine_path == "/tokenize"


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"\xff", "not UTF-8"), (b"{", "not valid JSON"), (b"[" * 200_000, "JSON"), (b"[]", "object")],
    ids=lambda x: str(x)[:10],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        EngineRequest.of(CHAT, body)
