"""What clients may not say, whose KV blocks they reach, and which bytes engines get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest, BodyTooLarge, ContextTooLong
from loomserve.platform.requests.client_body import with_fields
from loomserve.platform.requests.endpoints import MOST_TOKENIZE_BYTES
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.hints import BACKGROUND, DEADLINE, EXPECTED, Expected

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
    assert hinted.encoded.startswith(BODY[:-2])
    assert json.loads(hinted.encoded) == hinted.fields
    assert hinted.fields == {"model": "chat", "vllm_xargs": hints, "cache_salt": salt}
    assert hinted.engine_path == CHAT


@given(
    st.dictionaries(st.sampled_from(["model", "cache_salt", "vllm_xargs", "x"]), st.text()),
    st.sampled_from([None, 1, 4]),
    st.sampled_from(["", " ", "\r\n\t"]),
)
def test_what_is_put_at_the_end_of_any_body_holds(
    fields: dict[str, str], indent: int | None, space: str
) -> None:
    body = (space + json.dumps(fields, indent=indent) + space).encode()
    added = {"cache_salt": "ours", "vllm_xargs": {"a": [1.5]}}
    assert json.loads(with_fields(body, added)) == {**fields, **added}


def test_a_field_that_a_client_gives_twice_is_ours_in_the_end() -> None:
    body = b'{"cache_salt":"a","cache_salt":"b","vllm_xargs":{"x":1},"vllm_xargs":{"y":{"}":1}}}'
    request = EngineRequest.of(CHAT, body).isolated("alice").with_hints(background=True)
    sent = json.loads(request.encoded)
    assert sent["cache_salt"] == isolate({"cache_salt": "b"}, "alice")["cache_salt"]
    assert sent["vllm_xargs"] == {"y": {"}": 1}, BACKGROUND: 1}


def test_the_engine_has_its_own_names_for_some_endpoints() -> None:
    assert EngineRequest("/v1/tokenize", {}).engine_path == "/tokenize"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"[" * 200_000, "JSON"),
        (b"[]", "object"),
    ],
    ids=lambda x: str(x)[:10],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        EngineRequest.of(CHAT, body)


COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
PADDING = "x" * 2**18


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("path", "fields", "sequences"),
    [
        (CHAT, {"n": 128, "messages": [[], []]}, 128),
        (CHAT, {"n": -5}, 1),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2),
        (COMPLETIONS, {"prompt": ["a", '"b","c"'], "n": 3}, 6),
        (COMPLETIONS, {"prompt": [[1, 2], [3], [4]]}, 3),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": ["b", "c"]}, 3),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 2}, 1),
        (EMBEDDINGS, {"input": ["a"] * 1024}, 1),
    ],
)
def test_sequences_are_prompts_times_answers(
    path: str, fields: dict[str, Any], sequences: int, padding: str
) -> None:
    body = json.dumps({"model": "m", **fields, "metadata": padding}).encode()
    request = EngineRequest.of(path, body)
    assert request.sequences == sequences
    request.check_sequences(sequences)
    if sequences > 1:
        with pytest.raises(BadRequest):
            request.check_sequences(sequences - 1)


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
def test_texts_to_embed_have_a_bound_of_their_own(padding: str) -> None:
    for texts in (["a"] * 1025, [[1]] * 1025):
        body = json.dumps({"input": texts, "metadata": padding}).encode()
        with pytest.raises(BadRequest) as refused:
            EngineRequest.of(EMBEDDINGS, body).check_sequences(128)
        assert refused.value.param == "input"


LONG = "word " * 400
MEDIA = "data:image/png;base64," + "A" * 10_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": LONG}]}]}, "messages"),
        (CHAT, {"messages": [{"content": '{"url":"' + "A" * 2000 + '"}'}]}, "messages"),
        (CHAT, {"messages": [{"content": "\U0001f600" * 2000}]}, "messages"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [LONG, LONG]}, "prompt"),
        (COMPLETIONS, {"prompt": [7] * 2000}, "prompt"),
        ("/v1/tokenize", {"prompt": LONG}, "prompt"),
        ("/v1/detokenize", {"tokens": [7] * 2000}, "tokens"),
        ("/v1/responses", {"input": "x", "instructions": LONG}, "instructions"),
        ("/v1/messages", {"system": LONG, "messages": []}, "system"),
        ("/v1/messages/count_tokens", {"system": LONG, "messages": []}, "system"),
        (EMBEDDINGS, {"input": LONG}, "input"),
    ],
)
def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised(
    path: str, fields: dict[str, Any], param: str
) -> None:
    for body in (json.dumps(fields), json.dumps(fields, ensure_ascii=False)):
        request = EngineRequest.of(path, body.encode())
        with pytest.raises(ContextTooLong) as refused:
            request.check_texts(100)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
        request.check_texts(8192)
        request.check_texts(None)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"content": [{"image_url": {"url": MEDIA}}, {"text": "what?"}]}]}),
        (CHAT, {"messages": [{"content": [{"input_audio": {"data": "A" * 10_000}}]}]}),
        (CHAT, {"messages": [{"content": "字" * 1000}]}),
        (CHAT, {"messages": [], "metadata": {"x": LONG}}),
        (COMPLETIONS, {"prompt": ["word " * 300] * 20}),
        (COMPLETIONS, {"prompt": "", "prompt_embeds": "A" * 10_000}),
    ],
)
def test_texts_that_may_fit_pass(path: str, fields: dict[str, Any]) -> None:
    EngineRequest.of(path, json.dumps(fields).encode()).check_texts(100)


def test_a_request_for_tokens_is_bounded_before_it_is_read() -> None:
    body = b" " * (MOST_TOKENIZE_BYTES + 1)
    for path in ("/v1/tokenize", "/v1/detokenize"):
        with pytest.raises(BodyTooLarge):
            EngineRequest.of(path, body)


def test_a_number_that_json_does_not_have_is_refused_in_what_was_parsed_elsewhere() -> None:
    with pytest.raises(BadRequest, match="NaN"):
        _ = EngineRequest.of_fields(CHAT, {"temperature": float("nan")}).encoded


@pytest.mark.parametrize("value", [10**400, 2**63, -(2**63) - 1])
def test_a_number_that_no_message_to_an_engine_can_carry_is_refused(value: int) -> None:
    for fields in ({"top_k": value}, {"stop_token_ids": [1, value]}, {"vllm_xargs": {"x": value}}):
        with pytest.raises(BadRequest) as refused:
            EngineRequest.of(CHAT, json.dumps(fields).encode())
        assert refused.value.param in fields
    EngineRequest.of(CHAT, json.dumps({"seed": 2**63 - 1, "top_k": -(2**63)}).encode())
