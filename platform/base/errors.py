"""One exception tree; each class knows its HTTP status and its place in OpenAI's error body.

A :class:`ConfigError` or :class:`StartError` refuses to start, and :class:`RayEnded` stops serving.
A :class:`RequestError` is answered to one client.
"""

# The request errors bear the names of the HTTP statuses, which do not end in Error.
# ruff: noqa: N818

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

MOST_CHARACTERS = 4096
"""Of a message to a client."""
_CLOSE = MappingProxyType({"Connection": "close"})


class LoomserveError(Exception):
    """Base of every error Loomserve raises on purpose. ``str(error)`` is meant for the user."""


class ConfigError(LoomserveError):
    """The configuration is wrong; the message names the field and, where known, the line."""


class StartError(LoomserveError):
    """The machine cannot start what the configuration asks for: port, memory, compiler, network."""


class RayEnded(LoomserveError):
    """A process of Ray's without which nothing goes on has ended, though nobody ended it here."""


class RequestError(LoomserveError):
    """An answer to one client. ``reason`` is the label of ``loomserve_rejected_requests_total`` and
    OpenAI's ``code``; ``retry_after_s`` becomes the ``Retry-After`` header."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    reason: ClassVar[str] = "internal_error"
    own_headers: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        # Some have a client's own words.
        self.message = message[:MOST_CHARACTERS]
        self.param = param
        self.code = reason or self.reason
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {**self.own_headers}
        # Retry-After is in whole seconds; rounding down would invite a retry that fails again.
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s))), **self.own_headers}


class BadRequest(RequestError):
    status = 400
    type = "invalid_request_error"
    reason = "invalid_request"


class ContextTooLong(BadRequest):
    reason = "context_length_exceeded"


class UnexpectedBody(BadRequest):
    reason = "unexpected_body"
    # Who may have meant the body for a request of its own must not go on here.
    own_headers = _CLOSE


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    reason = "invalid_api_key"
    own_headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    reason = "forbidden"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    reason = "not_found"


class NothingThere(NotFound):
    """No endpoint has the request's path."""


class UnknownModel(NotFound):
    reason = "model_not_found"


class MethodNotAllowed(RequestError):
    """``allow`` lists the methods that the path answers, as the ``Allow`` header writes them."""

    status = 405
    type = "invalid_request_error"
    reason = "method_not_allowed"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Allow": self.allow}


class RequestTimeout(RequestError):
    status = 408
    type = "timeout_error"
    reason = "timeout"
    # The client may still be sending; what comes next on the connection is not a request.
    own_headers = _CLOSE


class Conflict(RequestError):
    status = 409
    type = "invalid_request_error"
    reason = "conflict"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    reason = "body_too_large"
    # The rest of the body is unwanted, and only closing the connection stops it.
    own_headers = _CLOSE


class UnsupportedBody(RequestError):
    """A body in an encoding that no endpoint reads."""

    status = 415
    type = "invalid_request_error"
    reason = "unsupported_media_type"
    own_headers = MappingProxyType({"Accept-Encoding": "identity"})


class TooManyRequests(RequestError):
    status = 429
    type = "rate_limit_error"
    reason = "rate_limit_exceeded"


class HeadTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    reason = "head_too_large"


class InternalError(RequestError):
    """An unexpected failure; the log has its cause under the request's id."""


QUERY_OF_DEATH = "query_of_death"
"""Code of an :class:`EngineGone` that several engines have ended with; no other is asked."""
ENGINE_STALLED = "engine_stalled"
"""Code of an :class:`EngineGone` whose engines stood still, but had not ended."""


class EngineGone(RequestError):
    status = 502
    type = "server_error"
    reason = "engine_gone"


class Unavailable(RequestError):
    status = 503
    type = "server_error"
    reason = "unavailable"


class TakenOver(Unavailable):
    """Another owner, of a later generation, has what this one would change."""
