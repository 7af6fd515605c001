"""The id of a request, the state of its response, and its trace from head to end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Collection, Mapping
from typing import Any

from starlette.types import Message, Scope, Send

from loomserve.platform.requests.endpoints import is_for_clients
from loomserve.platform.tracing import RequestTrace, RequestTracer

# Ids have to differ, and are no secrets; the kernel's own numbers take tens of microseconds each.
_random = random.Random()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_API = "/v1"


def choose_request_id(header: bytes | None) -> bytes:
    """The client's own id if it is 1 to 128 harmless characters, else a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header
    return b"%032x" % _random.getrandbits(128)


class Exchange:
    """Wraps the server's ``send``, cheaply: adds the ids and records how far the response got."""

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
        """The event with an OpenAI error that ends a stream that began with status 200."""
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


class IngressTraces:
    """Begins the traces of requests to the API for clients; others have none."""

    def __init__(self, tracer: RequestTracer, endpoints: Collection[str]) -> None:
        """``endpoints``: paths that name spans, for themselves and for what is below them."""
        self._tracer = tracer
        self._endpoints = sorted(endpoints, key=len, reverse=True)

    def begin(self, scope: Scope) -> RequestTrace | None:
        """The trace of a request whose scope has its id; None: it has none."""
        path: str = scope["path"]
        if path == _API or not is_for_clients(path):
            return None
        method: str = scope["method"]
        endpoint = self._endpoint(path)
        return self._tracer.begin(
            f"{method} {endpoint}",
            {
                "http.request.method": method,
                "http.route": endpoint,
                "loomserve.request_id": scope["state"]["request_id"],
            },
            headers=scope["headers"],
        )

    def _endpoint(self, path: str) -> str:
        # Spans are grouped by their names, of which clients must not make new ones.
        for endpoint in self._endpoints:
            if path == endpoint or path.startswith(endpoint + "/"):
                return endpoint
        return _API
