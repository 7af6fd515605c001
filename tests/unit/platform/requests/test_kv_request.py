"""Clients reach neither the engines' KV connector nor each other's KV blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.kv_request import isolate, refuse_kv_transfer

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
        refuse_kv_transfer({"model": "chat", **request_})
    assert refused.value.body()["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize(
    "request_",
    [{}, {"kv_transfer_params": None}, {"vllm_xargs": {"other": 1}}, {"vllm_xargs": "odd"}],
)
def test_any_other_request_passes(request_: dict[str, Any]) -> None:
    refuse_kv_transfer({"model": "chat", **request_})


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
