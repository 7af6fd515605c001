"""Says which endpoints a model has to who asks it for another."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from loomserve.platform.base.errors import NotFound


class MissingEndpoints:
    """ASGI application of an engine that knows which of the platform's endpoints it lacks.

    Which there are depends on the model: one that chats has no embeddings, and the other way round.
    """

    def __init__(self, app: Starlette, names: Mapping[str, str]) -> None:
        """``names``: the platform's endpoints, as the engine's server and as clients name them."""
        self._app = app
        there = {path for path in names if _answers(app, path)}
        self._missing = {path: name for path, name in names.items() if path not in there}
        self._there = ", ".join(name for path, name in names.items() if path in there)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._missing.get(scope.get("path", ""))
        if name is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = NotFound(
            f"This model does not answer {name}. It answers {self._there}.",
            reason="endpoint_not_found",
        )
        await JSONResponse(error.body(), error.status)(scope, receive, send)


def _answers(app: Starlette, path: str) -> bool:
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
