"""A port for the platform's own processes, which any local user could reach."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.base.errors import Forbidden
from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER


class GuardedApp:
    """ASGI application that asks for the internal token, and counts its open requests."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self.open_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No process of the platform speaks it, so a handshake must not slip past the token.
            await send({"type": "websocket.close", "code": 1008})
            return
        presented = dict(scope["headers"]).get(INTERNAL_TOKEN_HEADER.encode(), b"")
        if not hmac.compare_digest(presented, self._token):
            error = Forbidden("this port is for the gateway; ask the server's own address")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        self.open_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1
