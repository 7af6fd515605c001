"""Says which endpoints a model has to who asks it for another."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from loomserve.platform.base.errors import NotFound
from loomserve.platform.requests.endpoints import AT_ENGINE, Endpoint


class MissingEndpoints:
    """The vLLM app of a model, which knows the endpoints that its kind of model lacks."""

    def __init__(self, model: str, app: Starlette) -> None:
        self._model, self._app = model, app
        self._there = {path: row for path, row in AT_ENGINE.items() if _answers(app, row)}

    def check(self, path: str) -> None:
        """Raises NotFound if the model does not answer at vLLM's path, or sound cannot be read."""
        missing = AT_ENGINE.get(path)
        if missing is None:
            return
        if path in self._there:
            if missing.is_form and not _reads_sound():
                raise NotFound(
                    f"The model {self._model!r} can {missing.does}, but nothing here reads sound. "
                    "Ask the operator to install Loomserve's extra for it: loomserve[audio].",
                    reason="audio_not_installed",
                )
            return
        tasks = ", ".join(f"{row.does} ({row.name})" for row in self._there.values())
        raise NotFound(
            f"The model {self._model!r} does not {missing.does}. Its tasks are: {tasks}.",
            param="model",
            reason="endpoint_not_found",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.check(scope["path"])
        await self._app(scope, receive, send)


@cache
def _reads_sound() -> bool:
    """Whether there is a package by which vLLM reads sound; without one it fails on a request."""
    return any(find_spec(name) is not None for name in ("soundfile", "av"))


def _answers(app: Starlette, row: Endpoint) -> bool:
    path = row.at_engine
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    routed = any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
    return routed and getattr(app.state, row.handler, app) is not None
