"""Whether a replica's engine has answered a request, which gateways find out and tell it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loomserve.platform.fleet.messages import FIRST_ANSWER_PATH, FirstAnswer


class ToldAnswer:
    """What a replica has been told of its engine's first answer; its heartbeats pass it on."""

    def __init__(self, changed: Callable[[], Awaitable[None]]) -> None:
        """``changed``: is called when it says something else than before."""
        self.answers = False
        self.problem = ""
        self.routes = [Route(FIRST_ANSWER_PATH, self._told, methods=["PUT"])]
        self._changed = changed

    async def _told(self, request: Request) -> Response:
        told = FirstAnswer.model_validate_json(await request.body())
        before = self.answers, self.problem
        # One that has answered does: another gateway may be at fault.
        self.answers = self.answers or not told.problem
        self.problem = "" if self.answers else told.problem
        if (self.answers, self.problem) != before:
            await self._changed()
        return JSONResponse({})
