"""Errors of the Messages API, rewritten on their way out from OpenAI's shape into Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.types import Message, Send

from loomserve.platform.http.ingress.exchange import Exchange

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}
_CONTEXT = "context_length_exceeded"
# vLLM's words; of a prompt that it has cut to count it, it knows the least length.
_COUNTS = re.compile(
    r"maximum context length is (\d+) tokens.* requested (\d+) output tokens"
    r".* contains (at least )?(\d+) input tokens"
)


def anthropic_error(
    openai: Mapping[str, Any], status: int, request_id: str | None = None
) -> dict[str, Any]:
    """Anthropic's error object for the body of the same error in OpenAI's shape."""
    error = openai["error"]
    # vLLM makes chats of messages.
    message = str(error["message"]).replace("max_completion_tokens", "max_tokens")
    if error.get("code") == _CONTEXT:
        message = too_long(message)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    return body if request_id is None else {**body, "request_id": request_id}


def too_long(message: str) -> str:
    """Anthropic's words for what does not fit a model's context; Claude Code reads them, and
    asks for fewer tokens or compacts its conversation."""
    counts = _COUNTS.search(message)
    if counts is None:
        return f"prompt is too long: {message}"
    context, asked, prompt = (int(counts[group]) for group in (1, 2, 4))
    if prompt >= context or (counts[3] and asked <= context // 2):
        return f"prompt is too long: {max(prompt, context + 1)} tokens > {context} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}, "
        "decrease input length or `max_tokens` and try again"
    )


def stream_error(event: str) -> str:
    """A server-sent event of Anthropic's for one of vLLM's error in the midst of a stream."""
    _, _, body = event.partition("data:")
    code = json.loads(body)["error"].get("code")
    return anthropic_event(body.encode(), code if isinstance(code, int) else 500).decode()


def anthropic_event(body: bytes, status: int) -> bytes:
    """The event of an error, from OpenAI's body and the status that it would have had."""
    return _event(anthropic_error(json.loads(body), status))


def _event(body: Mapping[str, Any]) -> bytes:
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"


class MessagesExchange(Exchange):
    __slots__ = ("_error", "_head")

    def __init__(self, send: Send, request_id: bytes) -> None:
        super().__init__(send, request_id)
        self._head: Message | None = None
        """Of an answer that is an error, until the rest is there."""
        self._error = bytearray()

    def send(self, message: Message) -> Awaitable[None]:
        if self._head is None and message.get("status", 0) < 400:
            return super().send(message)
        return self._keep(message)

    async def _keep(self, message: Message) -> None:
        if self._head is None:
            self._head = self._start(message)
            return
        self._error += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = self._rewritten(self._head["status"], bytes(self._error))
        kept = [pair for pair in self._head["headers"] if pair[0].lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        self.complete = True
        await self._send({**self._head, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})

    def error_event(self, error: Mapping[str, Any], status: int) -> bytes:
        body = anthropic_error(error, status, self.request_id.decode())
        # The stream may have ended within an event, which an empty line ends.
        return b"\n\n" + _event(body)

    def _start(self, message: Message) -> Message:
        message = super()._start(message)
        # As Anthropic's clients look for it.
        return {**message, "headers": [*message["headers"], (b"request-id", self.request_id)]}

    def _rewritten(self, status: int, body: bytes) -> bytes:
        try:
            error = anthropic_error(json.loads(body), status, self.request_id.decode())
        except (ValueError, KeyError, TypeError):
            return body  # to HEAD, which has none
        return json.dumps(error).encode()
