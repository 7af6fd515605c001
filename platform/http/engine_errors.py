"""Engines' errors as clients get them: vLLM's bodies as OpenAI's object, and our own."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.types import Send

from loomserve.platform.base.errors import ENGINE_STALLED, EngineGone, InternalError, Unavailable
from loomserve.platform.engine.options.known import in_fields

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
_MOST_FAULTS = 5
_MOST_PARAM = 100
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 422: "invalid_request_error"}


def normalise(body: bytes, status: int) -> dict[str, Any]:
    """OpenAI's error object for the body of an engine's answer; ``status`` is 400 to 499."""
    try:
        error = json.loads(body)
    except ValueError:
        error = {}
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        words = body[: 4 * MOST_MESSAGE_CHARACTERS].decode("utf-8", "replace")
        message = words or f"the engine refused the request ({status})"
    return {
        "error": {
            "message": shortened(in_fields(_readable(message))),
            "type": _TYPES.get(status, "invalid_request_error"),
            "param": _param(error),
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
        return message
    told = [line.split(" [type=")[0].strip() for line in message.splitlines() if " [type=" in line]
    return "; ".join(dict.fromkeys(told[:_MOST_FAULTS])) or message


def _param(error: Any) -> str | None:
    param = error.get("param") if isinstance(error, dict) else None
    return param.removeprefix("body.")[:_MOST_PARAM] if isinstance(param, str) else None


def _code(error: Any, message: str, status: int) -> str:
    # vLLM's own are numbers; what stands before it on a replica has the platform's.
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        return str(error["code"])
    if "maximum context length" in message or "longer than the maximum model length" in message:
        return "context_length_exceeded"
    return "model_not_found" if status == 404 else "invalid_request"


async def send_error(body: bytes, status: int, send: Send) -> None:
    """Answer a client with the error, of 400 to 499, that an engine answered."""
    body = json.dumps(normalise(body, status)).encode()
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
