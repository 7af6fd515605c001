"""A deadline is the platform's to set, and arrives as it was set."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.hints import DEADLINE, deadline_of

CHAT = "/v1/chat/completions"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.floats(0, 1e12), st.none() | st.dictionaries(st.text(max_size=3), JSON))
def test_a_deadline_arrives_beside_the_clients_own_arguments(
    deadline: float, own: dict[str, Any] | None
) -> None:
    request = {"model": "chat", "vllm_xargs": own}
    sent = json.loads(EngineRequest(CHAT, request).with_hints(deadline=deadline).encoded)
    assert deadline_of(sent["vllm_xargs"]) == deadline
    assert repr(sent["vllm_xargs"]) == repr({**(own or {}), DEADLINE: deadline})
    assert request == {"model": "chat", "vllm_xargs": own}, "the request itself stays as it was"


@given(JSON | st.floats())
def test_nonsense_is_no_deadline(value: Any) -> None:
    found = deadline_of({DEADLINE: value})
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    assert found is None or (is_number and found == float(value))


@pytest.mark.parametrize(
    "extra",
    [None, {}, {"other": 1.0}]
    + [{DEADLINE: x} for x in (None, True, "1", [1], {}, float("nan"), float("inf"), 10**400)],
    ids=lambda extra: str(extra)[:40],
)
def test_without_a_finite_number_there_is_no_deadline(extra: dict[str, Any] | None) -> None:
    assert deadline_of(extra) is None


@pytest.mark.parametrize("value", [1e9, 0, None, "x"])
def test_a_client_that_sets_the_platforms_own_field_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="x-slo-ms") as refused:
        EngineRequest.of_fields(CHAT, {"model": "chat", "vllm_xargs": {DEADLINE: value}})
    assert refused.value.body()["error"]["param"] == DEADLINE


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, "odd", [1]])
def test_any_other_request_passes(extra: object) -> None:
    EngineRequest.of_fields(CHAT, {"model": "chat", "vllm_xargs": extra})
    EngineRequest.of_fields(CHAT, {"model": "chat"})


@pytest.mark.parametrize("extra", ["odd", [1], 7, False])
def test_what_vllm_will_refuse_is_left_for_it_to_refuse(extra: object) -> None:
    request = EngineRequest(CHAT, {"model": "chat", "vllm_xargs": extra})
    assert request.with_hints(deadline=1e9) is request
