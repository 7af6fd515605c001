"""Bounds vLLM's errors about wrong input: five faults at most, and nothing of the input.

vLLM has pydantic try each class on each list entry, keeps every fault with its input, and writes
all into one message: 350 MB for a request of 26 KB, on the event loop of all streams. Here
validation of a list ends at its first wrong entry.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import SchemaValidator
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import (
    VLLMClientError,
    VLLMError,
    VLLMNotFoundError,
    VLLMUnprocessableEntityError,
)

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.front_end.policy.input_faults import (
    InputFault,
    ReportedFault,
    class_name,
    message,
    reported_faults,
)
from loomserve.platform.http.engine_errors import shortened

_log = logging.getLogger(__name__)

_OF_ANOTHER_TYPE = (
    "a field has a value of another type than its place is for, or a name that is not its own; "
    "compare the request with the endpoint's documentation"
)
_READ_LATE = ("messages", "input")
_COLLECTIONS = ("list", "tuple", "set", "frozenset", "dict")
# Classes of Python's, of which clients know nothing.
_INSTANCE = re.compile(r" or (an )?(instance of \S+|object to extract fields from)")
_STATUS: dict[type[Exception], int] = {VLLMNotFoundError: 404, VLLMUnprocessableEntityError: 422}


def bound_input_errors(app: Any) -> None:
    """Bound the errors of vLLM's application; called before its first request."""
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            _bound(route.dependant)
    # Some of vLLM's serving classes read a request's parts late, with pydantic.
    app.exception_handler(ValidationError)(_refuse_faults)
    app.exception_handler(RequestValidationError)(_refuse_faults)
    app.exception_handler(BadRequest)(_refuse)
    # vLLM's serving classes answer most of their own errors themselves.
    error_response.sanitize_message = _sanitized
    app.exception_handler(VLLMClientError)(_refuse_client)
    for kind in (ValueError, TypeError, OverflowError, RecursionError):
        app.exception_handler(kind)(_refuse_client)


def _bound(dependant: Dependant) -> None:
    for field in dependant.body_params:
        adapter: Any = InputValidator(field._type_adapter.core_schema)
        field._type_adapter = adapter


class InputValidator:
    """Replaces pydantic's adapter of the type of an endpoint's request."""

    def __init__(self, schema: Any) -> None:
        self.core_schema = schema
        # What a class has for itself would not end with the first wrong entry.
        self._validator = SchemaValidator(_changed(schema, {}, _early), None, _use_prebuilt=False)

    def validate_python(self, value: Any, **options: Any) -> Any:
        """Raises BadRequest for a wrong value, and VLLMError where vLLM's own validators do."""
        try:
            return self._validator.validate_python(value, **options)
        except ValidationError as error:
            given = _without_nulls(value, error)
            if given is not value:
                return self.validate_python(given, **options)
            raise refused(error, value) from None
        except VLLMError:
            raise
        except Exception as error:
            # vLLM's validators look into values before these have been found to be of their types.
            _log.info("a request was refused: %s in vLLM's validators", type(error).__name__)
            self.check_types(value)
            raise BadRequest(_OF_ANOTHER_TYPE) from None

    def check_types(self, value: Any) -> None:
        """Check types alone, also of what vLLM would read later; raises BadRequest."""
        schema = _changed(self.core_schema, {}, _plain)
        try:
            SchemaValidator(schema, None, _use_prebuilt=False).validate_python(value)
        except ValidationError as error:
            raise refused(error, value) from None
        except VLLMError:
            return


def _without_nulls(value: Any, error: ValidationError) -> Any:
    """The request without fields that are null where vLLM's class has no null: as OpenAI's
    clients mean it, they are not there."""
    if not isinstance(value, dict):
        return value
    wrong = {each["loc"][0] for each in error.errors(include_url=False) if each["loc"]}
    nulls = {name for name in wrong if name in value and value[name] is None}
    return {k: v for k, v in value.items() if k not in nulls} if nulls else value


def refused(error: ValidationError, value: Any = None) -> BadRequest:
    """The error that a client gets; ``value``: what was validated, where it is known."""
    listed = error.errors(include_url=False, include_input=False)
    faults = [InputFault(each["loc"], each["type"], _words(each)) for each in listed]
    return _refusal(reported_faults(faults, value))


def _words(fault: Any) -> str:
    words = _INSTANCE.sub("", shortened(str(fault["msg"]).removeprefix("Value error, ")))
    return words.replace("dictionary", "object").replace("iterable", "list")


def _refusal(faults: list[ReportedFault]) -> BadRequest:
    param = next((fault.param for fault in faults if fault.param), None)
    return BadRequest(message(faults) or "the request is not valid", param=param)


async def _refuse(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.body(), error.status)


async def _refuse_faults(request: Request, error: Any) -> JSONResponse:
    if isinstance(error, ValidationError):
        return await _refuse(request, await refused_late(request, error))
    # FastAPI's own: of headers, and of what is no JSON.
    listed = [each for each in error.errors()[:1] if isinstance(each, dict)]
    says = _words(listed[0]) if listed else shortened(str(next(iter(error.errors()), "")))
    return await _refuse(request, BadRequest(says))


async def refused_late(request: Request, error: ValidationError) -> BadRequest:
    """The error for a part that vLLM has read by itself, which does not say where that part is."""
    body = await request.json()
    try:
        (field,) = request.scope["route"].dependant.body_params
        field._type_adapter.check_types(body)
    except BadRequest as whole:
        return whole
    part = refused(error)
    within = next((name for name in _READ_LATE if isinstance(body.get(name), list)), None)
    return BadRequest(f"{within}: {part.message}" if within else part.message, param=within)


async def _refuse_client(request: Request, error: Any) -> JSONResponse:
    """Errors that vLLM's server answers with their whole texts, values of the request included."""
    if isinstance(error, ValidationError):
        return await _refuse_faults(request, error)
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
    says = Exception.__str__(error) if isinstance(error, VLLMError) else str(error)
    if "argument" in says and isinstance(error.__cause__ or error, TypeError):
        says = _OF_ANOTHER_TYPE  # A name that the renderer gives, too; a template's words stay.
    param = getattr(error, "parameter", None)
    return JSONResponse({"error": {"message": _sanitized(says), "param": param}}, status)


def _sanitized(message: str) -> str:
    """Without paths and addresses, which takes vLLM minutes in a text of 30 KB with slashes."""
    if message.startswith("maximum recursion depth"):
        return "a field, or a call's arguments, is nested too deeply"
    cleaned: str = sanitize_message(shortened(message))
    return cleaned


def _early(schema: dict[str, Any]) -> dict[str, Any]:
    """A collection ends with its first wrong entry, and classes are kept apart."""
    if schema.get("type") in _COLLECTIONS:
        return {**schema, "fail_fast": True}
    if schema.get("type") == "union":
        choices = [each[0] if isinstance(each, tuple) else each for each in schema["choices"]]
        named = [(each, class_name(number)) for number, each in enumerate(choices)]
        return {**schema, "choices": named}
    return schema


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, read at once, and without functions that look at a value before pydantic does."""
    while schema.get("type") in ("function-before", "function-wrap"):
        schema = {**schema["schema"], **({"ref": schema["ref"]} if "ref" in schema else {})}
    if schema.get("type") == "generator":
        schema = {"type": "list", "items_schema": schema["items_schema"]}
    return _early(schema)


def _changed(schema: Any, copies: dict[int, Any], change: Any) -> Any:
    if id(schema) in copies:
        return copies[id(schema)]
    if isinstance(schema, dict):
        copy: dict[str, Any] = {}
        copies[id(schema)] = copy
        for name, value in change(schema).items():
            keep = name in ("metadata", "default", "serialization")
            copy[name] = value if keep else _changed(value, copies, change)
        return copy
    if type(schema) in (list, tuple):
        return type(schema)(_changed(each, copies, change) for each in schema)
    return schema
