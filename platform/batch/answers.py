"""The lines of output and error files, as OpenAI writes them."""

from __future__ import annotations

import json
from typing import Any

from loomserve.platform.batch.executor import LineAnswer
from loomserve.platform.batch.policy.objects import BatchStatus, new_id
from loomserve.platform.batch.store.lines import StoredAnswer

_UNANSWERED = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed; see the batch's errors.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "This request was not executed before the batch was cancelled.",
    ),
}


def answered(
    batch_id: str, number: int, custom_id: str, request_id: str, said: LineAnswer
) -> StoredAnswer:
    """The answer of an engine or the platform, as a line of the output or error file."""
    body = _parsed(said)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    response = {"status_code": said.status, "request_id": request_id, "body": body}
    return StoredAnswer(
        batch_id=batch_id,
        number=number,
        ok=said.status == 200,
        text=_line(custom_id, response, None),
        input_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else 0),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def unanswered(custom_id: str, ending: BatchStatus) -> bytes:
    """The line of the error file for a request that had no answer when its batch ended."""
    code, message = _UNANSWERED[ending]
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _parsed(said: LineAnswer) -> dict[str, Any]:
    try:
        body = json.loads(said.body)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    message = f"the engine answered with something that is not JSON ({said.status})"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
