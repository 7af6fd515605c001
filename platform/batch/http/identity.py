"""The owner of a request to the batch lane, signed by the gateway that forwards it. Pure.

One field says whose request it is, and is good for that one request alone: neither another head on
the same connection nor another process of this machine can make one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from loomserve.platform.base.errors import Forbidden

FRESH_S = 30.0
"""A field is good for so long before and after it was signed."""


def target_of(scope: Mapping[str, Any]) -> str:
    """Path and query of an ASGI request, as its client wrote them."""
    query = scope["query_string"].decode("latin-1")
    path: str = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    return f"{path}?{query}" if query else path


def sign(token: str, owner: str, method: str, target: str, now_s: float) -> str:
    """The field's value for a request's method and target, its path and query. ``owner`` is the
    name of its API key, or nothing; ``now_s`` is of the monotonic clock of the lane's node."""
    signed_ms = str(int(now_s * 1000))
    name = base64.urlsafe_b64encode(owner.encode()).decode()
    return f"{signed_ms}.{name}.{_code(token, signed_ms, name, method, target)}"


def owner_of(token: str, field: str, method: str, target: str, now_s: float) -> str:
    """The owner that a field names. Raises Forbidden if the field was not made with the token, for
    this request, at this time."""
    signed_ms, _, rest = field.partition(".")
    name, _, code = rest.partition(".")
    expected = _code(token, signed_ms, name, method, target)
    genuine = hmac.compare_digest(code.encode(), expected.encode())
    # Only what is genuine is a number for sure.
    if not genuine or abs(now_s - int(signed_ms) / 1000) > FRESH_S:
        raise Forbidden("this port is for the gateway; ask the server's own address")
    return base64.urlsafe_b64decode(name).decode()


def _code(token: str, *parts: str) -> str:
    # JSON keeps the parts apart, whatever is in them.
    return hmac.new(token.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()
