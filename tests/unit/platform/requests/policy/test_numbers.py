"""Values that engines cannot read are refused before them."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2**63},
        {"seed": -(2**63) - 1},
        {"max_tokens": 1e30},
        {"structured_outputs": 2},
        {"structured_outputs": []},
    ],
)
def test_what_vllm_would_fail_on_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineRequest.of_fields("/v1/completions", {"model": "m", **wrong})
    assert refused.value.param in wrong


@pytest.mark.parametrize(
    "right",
    [
        {"seed": 2**63 - 1, "top_k": -(2**63), "temperature": 0.5, "stream": True, "stop": None},
        {"structured_outputs": None},
        {"structured_outputs": {"regex": "yes|no"}},
    ],
)
def test_the_rest_passes(right: dict[str, Any]) -> None:
    EngineRequest.of_fields("/v1/completions", {"model": "m", **right})
