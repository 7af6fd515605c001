"""The id of a request and the state of its response."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.types import Message, Send

from loomserve.platform.tracing import RequestTrace

# Ids have to differ, and are no secrets; the kernel's own numbers take tens of microseconds each.
_random = random.Random()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def choose_request_id(header: bytes | None) -> bytes:
    """The client's own id if it is 1 to 128 harmless characters, else a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header
    return b"%032x" % _random.getrandbits(128)


class Exchange:
    """Wrapper of the server's ``send``: adds the ids and records how far the response got.

    Every chunk of a stream passes it, so it does next to nothing.
    """

    __slots__ = ("_send", "complete", "is_event_stream", "request_id", "status", "trace")

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None
        self.is_event_stream = False
        self.complete = False
        self.trace: RequestTrace | None = None

    def send(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind == "http.response.body":
            if not message.get("more_body", False):
                self.complete = True
        elif kind == "http.response.start":
            message = self._start(message)
        return self._send(message)

    def error_event(self, error: Mapping[str, Any], status: int) -> bytes:
        """The event that ends a stream that began with status 200: an OpenAI error's body.

        ``status`` is what the answer would have had.
        """
        # The stream may have ended within an event, which an empty line ends.
        return b"\n\ndata: " + json.dumps(error).encode() + b"\n\n"

    def _start(self, message: Message) -> Message:
        headers = [pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"]
        self.is_event_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        self.status = message["status"]
        headers.append((b"x-request-id", self.request_id))
        if self.trace is not None:
            headers.append(self.trace.response_header)
        return {**message, "headers": headers}
