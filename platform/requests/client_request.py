"""A client's request as it came: parsed, and refused where it speaks for the platform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.kv_request import refuse_kv_transfer
from loomserve.platform.requests.scheduler_fields import refuse_scheduler_fields


def parse(body: bytes) -> dict[str, Any]:
    """
    Raises:
        BadRequest: it is no JSON object.
    """
    try:
        parsed = json.loads(body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest('the body must be a JSON object, such as {"model": …, "messages": […]}')
    return parsed


def refuse_own_channels(request: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: the request uses a channel of the platform's own to its engines.
    """
    refuse_kv_transfer(request)
    refuse_scheduler_fields(request)
