"""Rewrites vLLM's error bodies into OpenAI's object: string codes and OpenAI's types."""

from __future__ import annotations

import json
from typing import Any

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
        message = body.decode("utf-8", "replace") or f"the engine refused the request ({status})"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "invalid_request_error"),
            "param": error.get("param") if isinstance(error, dict) else None,
            "code": _code(error, message, status),
        }
    }


def _code(error: Any, message: str, status: int) -> str:
    # vLLM's own are numbers; what stands before it on a replica has the platform's.
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        return str(error["code"])
    if "maximum context length" in message or "longer than the maximum model length" in message:
        return "context_length_exceeded"
    return "model_not_found" if status == 404 else "invalid_request"
