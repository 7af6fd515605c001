"""How a batch's line reaches the engine's scheduler as what it is: in the request itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loomserve.deployments.deadline import XARGS, with_xarg
from loomserve.platform.errors import BadRequest
from loomserve.platform.scheduling.background import BACKGROUND

# Of the batch lane's endpoints those whose requests have that field.
_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions"})


def refuse_background(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request carries the platform's own field.
    """
    extra = request.get(XARGS)
    if isinstance(extra, dict) and BACKGROUND in extra:
        raise BadRequest(
            f"{BACKGROUND} is the platform's own; send work that may wait as a batch",
            param=BACKGROUND,
        )


def refuse_stream(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: nobody could follow the stream that the line asks for.
    """
    if request.get("stream"):
        raise BadRequest("a batch's requests cannot stream; leave it out", param="stream")


def as_background(request: dict[str, Any], path: str) -> dict[str, Any]:
    """The request, to be served after all that are not; as it was where vLLM cannot be told."""
    return with_xarg(request, BACKGROUND, 1) if path in _ENDPOINTS else request
