"""How a client's deadline reaches the engine's scheduler: in the request itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loomserve.platform.errors import BadRequest
from loomserve.platform.scheduling.deadline import DEADLINE

XARGS = "vllm_xargs"
# Those of vLLM's endpoints whose requests have that field, which the engine gets as extra_args.
ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


def refuse_deadline(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request carries the platform's own field.
    """
    extra = request.get(XARGS)
    if isinstance(extra, dict) and DEADLINE in extra:
        raise BadRequest(
            f"{DEADLINE} is the platform's own; set a deadline with the x-slo-ms header",
            param=DEADLINE,
        )


def with_deadline(request: dict[str, Any], deadline: float) -> dict[str, Any]:
    """The request with its deadline, Unix seconds; as it was where vLLM will refuse it."""
    return with_xarg(request, DEADLINE, deadline)


def with_xarg(request: dict[str, Any], name: str, value: float | list[float]) -> dict[str, Any]:
    """The request with one of the platform's own fields."""
    extra = request.get(XARGS)
    if extra is not None and not isinstance(extra, dict):
        return request
    return {**request, XARGS: {**(extra or {}), name: value}}
