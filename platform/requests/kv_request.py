"""What a client's request may say about KV blocks, and whose blocks it may read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest

_KV_TRANSFER = "kv_transfer_params"
# vLLM's own bound.
_LONGEST_SALT = 1024


def refuse_kv_transfer(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request speaks to the engine's KV connector, which only the platform may.
    """
    extra = request.get("vllm_xargs")
    for place in (request, extra if isinstance(extra, dict) else {}):
        if place.get(_KV_TRANSFER) is not None:
            raise BadRequest(
                f"{_KV_TRANSFER} is the platform's own channel to its engines; leave it out",
                param=_KV_TRANSFER,
            )


def isolate(request: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """The request with a ``cache_salt`` (vLLM's field) that no other tenant's request can have.

    A salt of the client's own still keeps its requests apart from each other.

    Raises:
        BadRequest: the client's own salt is none.
    """
    own = request.get("cache_salt")
    if own is not None and not (isinstance(own, str) and 0 < len(own) <= _LONGEST_SALT):
        raise BadRequest(
            f"cache_salt must be text of 1 to {_LONGEST_SALT} characters", param="cache_salt"
        )
    salt = hashlib.sha256(json.dumps([tenant, own]).encode()).hexdigest()
    return {**request, "cache_salt": salt}
