"""Engines' errors as clients get them: vLLM's bodies as OpenAI's object, and our own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from starlette.types import Send

from loomserve.platform.base.errors import ENGINE_STALLED, EngineGone, InternalError, Unavailable
from loomserve.platform.engine.options.known import in_fields
from loomserve.platform.requests.client_body import TEXTS
from loomserve.platform.requests.policy.sequences import LENGTHS

PASSED_BACK = frozenset({b"content-type", b"content-length", b"cache-control", b"metadata"})
"""Headers of an engine's answer that its client gets; ``metadata`` is where vLLM tells which bytes
are which text's embedding."""
MOST_WORDS = 2000
"""Bytes of an engine's own words that go to the log, as far as they fit into a line."""
MOST_ERROR_BYTES = 2**16
"""Of an engine's error that are kept; its client gets less."""
MOST_MESSAGE_CHARACTERS = 1024
"""Of an engine's own words that its client gets."""

_RETRY_AFTER_S = 5.0
_OF_PYDANTIC = re.compile(r"\d+ validation errors? for ")
# What vLLM's str() of an error adds to its message.
_REPEATED = re.compile(r" \(parameter=\w+(, value=.*)?\)$", re.DOTALL)
_MOST_FAULTS = 5
_MOST_PARAM = 100
_WORD = re.compile(r"[a-z_]+")
# Fields that are words of English, too.
_COMMON = frozenset({"model", "stream", "user", "text", "include", "data", "items", "metadata"})
# What vLLM's errors are about that name no field, and which fields that may be.
_ABOUT = (
    (
        re.compile("[Gg]rammar|[Ss]tructur(ed|al)|^Choice "),
        ("response_format", "structured_outputs", "text", "output_config", "tools"),
    ),
    (re.compile("^max_(completion_)?tokens"), LENGTHS),
    (re.compile("^Chat template is passed"), ("chat_template",)),
    (re.compile("^stop "), ("stop_sequences",)),
    (re.compile("_pattern_size"), ("repetition_detection",)),
    (re.compile("Matryoshka"), ("dimensions", "output_dimension")),
    (re.compile("text_pair"), ("documents", "text_2", "data_2", "items")),
    (re.compile("[Pp]rompt|[Mm]ulti[mM]odal|message|content part|Token id|context length"), TEXTS),
)
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 422: "invalid_request_error"}


def normalise(body: bytes, status: int, fields: Collection[str] = ()) -> dict[str, Any]:
    """OpenAI's error object for the body of an engine's answer; ``status`` is 400 to 499.
    ``fields`` are the names that the request has, one of which its ``param`` is to be."""
    try:
        error = json.loads(body)
    except ValueError:
        error = {}
    error = error if isinstance(error, dict) else {}
    if isinstance(error.get("error"), dict):
        error = error["error"]
    message = error.get("message")
    if not isinstance(message, str):
        words = body[: 4 * MOST_MESSAGE_CHARACTERS].decode("utf-8", "replace")
        message = words or f"the engine refused the request ({status})"
    return {
        "error": {
            "message": shortened(in_fields(_readable(message))),
            "type": _TYPES.get(status, "invalid_request_error"),
            "param": _param(error, message, fields),
            "code": _code(error, message, status),
        }
    }


def shortened(words: str) -> str:
    if len(words) <= MOST_MESSAGE_CHARACTERS:
        return words
    return words[: MOST_MESSAGE_CHARACTERS - 1] + "…"


def _readable(message: str) -> str:
    """Without what pydantic repeats of the request, where vLLM passes its message on as it is."""
    if _OF_PYDANTIC.match(message) is None:
        return _REPEATED.sub("", message)
    told = [line.split(" [type=")[0].strip() for line in message.splitlines() if " [type=" in line]
    return "; ".join(dict.fromkeys(told[:_MOST_FAULTS])) or message


def _param(error: dict[str, Any], message: str, fields: Collection[str]) -> str | None:
    given = error.get("param")
    param = given.removeprefix("body.")[:_MOST_PARAM] if isinstance(given, str) else None
    if not fields or isinstance(error.get("code"), str):
        return param  # ours, which may be of a field that is missing
    if param == "logprobs" and "top_logprobs" in fields:
        return "top_logprobs"
    if param is not None and re.split(r"[.\[]", param)[0] in fields:
        return param
    named = (word for word in _WORD.findall(message) if word in fields and word not in _COMMON)
    about = next((names for words, names in _ABOUT if words.search(message)), ())
    return next(named, next((name for name in about if name in fields), param))


def _code(error: dict[str, Any], message: str, status: int) -> str:
    # vLLM's own are numbers; what stands before it on a replica has the platform's.
    if isinstance(error.get("code"), str):
        return str(error["code"])
    if "maximum context length" in message or "longer than the maximum model length" in message:
        return "context_length_exceeded"
    return "model_not_found" if status == 404 else "invalid_request"


async def send_error(body: bytes, status: int, send: Send, fields: Collection[str] = ()) -> None:
    """Answer a client, whose request has ``fields``, with the error of 400 to 499 that an engine
    answered."""
    body = json.dumps(normalise(body, status, fields)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def engine_failed(model: str, request_id: str) -> InternalError:
    return InternalError(
        f"the engine of model {model!r} failed on this request. Send it again; if it fails "
        f"again, give the operator its id, {request_id}",
        reason="engine_failed",
    )


def engine_stalled(model: str, idle_timeout_s: float) -> EngineGone:
    return EngineGone(
        f"the engine of model {model!r} sent nothing for {idle_timeout_s:g} s in the "
        "midst of its answer; send the request again",
        reason=ENGINE_STALLED,
    )


def model_failed(model: str) -> Unavailable:
    """A model cannot be loaded, or does not answer: only an operator can change that."""
    return Unavailable(
        f"model {model!r} has failed, and is not loaded again by itself: ask the operator, whom "
        "`loomserve status` tells why",
        reason="model_failed",
    )


def no_replica(model: str) -> Unavailable:
    return Unavailable(
        f"model {model!r} has no replica that takes requests now; try again shortly",
        reason="no_replica",
        retry_after_s=_RETRY_AFTER_S,
    )
