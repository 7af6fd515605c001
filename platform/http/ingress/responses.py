"""Errors as clients see them: OpenAI's error object, as a response or as an event of a stream."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loomserve.platform.base.errors import (
    BadRequest,
    InternalError,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from loomserve.platform.base.reply import Reply
from loomserve.platform.config import FieldError
from loomserve.platform.http.ingress.paths import nothing_at

T = TypeVar("T")


def error_response(error: RequestError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def respond(reply: Reply[T]) -> T | Response:
    """An actor's reply for FastAPI: its value, or a response with its error."""
    return cast("T", reply.value) if reply.error is None else error_response(reply.error)


def as_request_error(error: Exception) -> RequestError:
    """The error that the client is told: ``error`` itself, or an internal error."""
    if isinstance(error, RequestError):
        return error
    return InternalError(
        "The server failed on this request. Try again; if it fails again, give the operator the "
        "X-Request-Id of this response."
    )


async def _refuse_http(request: Request, error: HTTPException) -> NoReturn:
    path = request.scope["path"]
    if error.status_code == MethodNotAllowed.status:
        allow = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed(
            f"{path} does not answer {request.method}. Use {allow or 'another method'}.",
            allow=allow,
        ) from None
    if error.status_code == NotFound.status:
        raise nothing_at(path) from None
    raise BadRequest(error.detail) from None


async def _refuse_validation(_: Request, error: RequestValidationError) -> NoReturn:
    problems = error.errors()
    # The first part of a place says where the value came from: body, query, path or header.
    places = [_place(problem) for problem in problems]
    messages = [str(problem["msg"]).removeprefix("Value error, ") for problem in problems]
    message = "; ".join(
        f"{place}: {text}" if place else text for place, text in zip(places, messages, strict=True)
    )
    raise BadRequest(message, param=places[0] or None) from None


async def _respond(_: Request, error: Exception) -> Response:
    return error_response(as_request_error(error))


# For Starlette(exception_handlers=...) and FastAPI's, so that all errors have one shape. Starlette
# answers with what the handler of Exception returns and raises the error on, so the middleware
# sees, logs and counts it too.
exception_handlers: dict[
    int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]
] = {HTTPException: _refuse_http, RequestValidationError: _refuse_validation, Exception: _respond}


def _place(problem: Mapping[str, Any]) -> str:
    cause = problem.get("ctx", {}).get("error")
    within = cause.field if isinstance(cause, FieldError) else ()
    return ".".join(str(part) for part in (*problem["loc"][1:], *within))
