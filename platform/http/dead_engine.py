"""Tells which requests an engine had when it ended, and which came too late.

The HTTP server of a replica outlives its engine by seconds, and answers both alike.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loomserve.platform.base.errors import EngineGone, Unavailable

_STREAM = b"text/event-stream"


class EngineEndedError(Exception):
    """The engine ended in the midst of an answer, whose connection is cut for it."""


class DeadEngineApp:
    """ASGI application of an engine that answers POST requests 503 once it has ended.

    An error in answer to a request that the engine had then is 502, and a stream that had begun
    ends with its connection.
    """

    def __init__(self, app: ASGIApp, dead: Callable[[], bool]) -> None:
        self._app = app
        self._dead = dead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._dead():
            error = Unavailable("the engine of this replica has ended")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        streams = False

        async def told(message: Message) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = dict(message["headers"]).get(b"content-type", b"").startswith(_STREAM)
                if message["status"] >= 500 and self._dead():
                    message = {**message, "status": EngineGone.status}
            elif streams and not message.get("more_body", False) and self._dead():
                raise EngineEndedError
            await send(message)

        await self._app(scope, receive, told)
