"""What the platform tells an engine's scheduler of a request, in the request itself: its deadline,
its predicted length, that it may wait. Clients may set none of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.scheduling.policy.background import BACKGROUND
from loomserve.platform.scheduling.policy.deadline import DEADLINE
from loomserve.platform.scheduling.policy.expected import EXPECTED, Expected

_XARGS = "vllm_xargs"
# Those of vLLM's endpoints whose requests have that field, which the engine gets as extra_args.
ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_INSTEAD = {
    DEADLINE: "set a deadline with the x-slo-ms header",
    BACKGROUND: "send work that may wait as a batch",
    EXPECTED: "lengths are predicted where models[].lengths says so; leave it out",
}


def refuse_scheduler_fields(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request carries one of the platform's own fields.
    """
    extra = request.get(_XARGS)
    for field, instead in _INSTEAD.items():
        if isinstance(extra, dict) and field in extra:
            raise BadRequest(f"{field} is the platform's own; {instead}", param=field)


def with_deadline(request: dict[str, Any], deadline: float) -> dict[str, Any]:
    """The request with its deadline, Unix seconds; as it was where vLLM will refuse it."""
    return _with(request, DEADLINE, deadline)


def with_expected(request: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """The request with its prediction; as it was where vLLM will refuse it."""
    return _with(request, EXPECTED, [expected.tokens, expected.high])


def as_background(request: dict[str, Any], path: str) -> dict[str, Any]:
    """The request, to be served after all that are not; as it was where vLLM cannot be told."""
    return _with(request, BACKGROUND, 1) if path in ENDPOINTS else request


def _with(request: dict[str, Any], field: str, value: float | list[float]) -> dict[str, Any]:
    extra = request.get(_XARGS)
    if extra is not None and not isinstance(extra, dict):
        return request
    return {**request, _XARGS: {**(extra or {}), field: value}}
