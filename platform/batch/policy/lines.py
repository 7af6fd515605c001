"""Reads and checks the lines of an input file before a batch begins, as OpenAI does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from loomserve.platform.batch.policy.objects import LineError
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.requests.policy.sequences import longest, sequences

# A file full of the same mistake needs no error for each line.
_MOST_ERRORS = 100
_LONGEST_ID = 512
# Room for what a line has beside its body.
_ENVELOPE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch, without its body: line ``number``, from 1, of ``size`` bytes at
    ``offset``.

    Attributes:
        max_tokens: Most tokens of one answer; None: the model's own bound.
        sequences: Answers that the engine computes at once for it.
        attempts: How often engines have failed on it.
        alias: The alias that it names, one of whose models ``model`` is; empty: it names that.
    """

    number: int
    custom_id: str
    model: str
    offset: int
    size: int
    max_tokens: int | None
    sequences: int
    attempts: int = 0
    alias: str = ""


@dataclass
class CheckedFile:
    """Lines of a file, and its errors; with errors the lines are of no use."""

    lines: list[BatchLine] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)


class _WrongLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def check(stream: BinaryIO, endpoint: str, *, max_lines: int, max_body: int) -> CheckedFile:
    """Read and check a file from its beginning; empty lines do not count."""
    found = CheckedFile()
    seen: set[str] = set()
    longest = max_body + _ENVELOPE_BYTES
    number = offset = 0
    while text := stream.readline(longest + 1):
        number += 1
        if len(text) > longest:
            message = f"The line is longer than {longest} bytes. Split the request."
            found.errors.append(LineError(code="line_too_long", message=message, line=number))
            break
        if text.strip():
            try:
                line = _line(text, number, offset, endpoint, seen)
                found.lines.append(line)
            except _WrongLineError as wrong:
                found.errors.append(
                    LineError(
                        code=wrong.code, message=wrong.message, param=wrong.param, line=number
                    )
                )
        offset += len(text)
        if len(found.lines) > max_lines:
            message = f"The file has more than {max_lines} requests. Split it."
            found.errors.append(LineError(code="too_many_lines", message=message))
        if len(found.errors) >= _MOST_ERRORS or len(found.lines) > max_lines:
            break
    if not found.lines and not found.errors:
        message = (
            "The input file is empty. Please ensure that the batch contains at least one line."
        )
        found.errors.append(LineError(code="empty_file", message=message))
    return found


def parse(text: bytes) -> dict[str, Any]:
    """Parse a line that :func:`check` accepted."""
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _line(text: bytes, number: int, offset: int, endpoint: str, seen: set[str]) -> BatchLine:
    try:
        line = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _WrongLineError(
            "invalid_json_line", "This line is not parseable as valid JSON."
        ) from None
    if not isinstance(line, dict):
        raise _WrongLineError("invalid_json_line", "This line is not a JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            raise _WrongLineError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name
            )
    custom_id = _custom_id(line["custom_id"], seen)
    if line["method"] != "POST":
        raise _WrongLineError("invalid_method", "The HTTP method must be 'POST'.", "method")
    if line["url"] != endpoint:
        raise _WrongLineError(
            "invalid_url",
            f"The URL provided for this request does not match the batch endpoint {endpoint!r}.",
            "url",
        )
    body = line["body"]
    if not isinstance(body, dict):
        raise _WrongLineError("invalid_request", "The body must be a JSON object.", "body")
    model = body.get("model")
    if not isinstance(model, str) or not model or not _is_text(model):
        raise _WrongLineError(
            "missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model"
        )
    return BatchLine(
        number=number,
        custom_id=custom_id,
        model=model,
        offset=offset,
        size=len(text),
        max_tokens=longest(body) if ENDPOINTS[endpoint].generates else 0,
        sequences=sequences(ENDPOINTS[endpoint], body),
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _custom_id(custom_id: object, seen: set[str]) -> str:
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID:
        message = f"The custom_id must be text of 1 to {_LONGEST_ID} characters."
        raise _WrongLineError("invalid_custom_id", message, "custom_id")
    if not _is_text(custom_id):
        raise _WrongLineError(
            "invalid_custom_id", "The custom_id is not valid Unicode.", "custom_id"
        )
    if custom_id in seen:
        raise _WrongLineError(
            "duplicate_custom_id",
            f"The custom_id {custom_id!r} for this request is a duplicate of another request. "
            "The custom_id parameter must be unique for each request in a batch.",
            "custom_id",
        )
    seen.add(custom_id)
    return custom_id


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True
