"""How a predicted length reaches the engine's scheduler: in the request itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loomserve.deployments.deadline import XARGS, with_xarg
from loomserve.platform.errors import BadRequest
from loomserve.platform.scheduling.expected import EXPECTED, Expected


def refuse_expected(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request carries the platform's own field.
    """
    extra = request.get(XARGS)
    if isinstance(extra, dict) and EXPECTED in extra:
        raise BadRequest(
            f"{EXPECTED} is the platform's own, which predicts lengths itself where "
            "models[].lengths says so; leave it out",
            param=EXPECTED,
        )


def with_expected(request: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """The request with its prediction; as it was where vLLM will refuse it."""
    return with_xarg(request, EXPECTED, [expected.tokens, expected.high])
