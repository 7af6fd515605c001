"""Endpoints whose streams pass through no framework."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send


class DirectPosts:
    """ASGI application that gives endpoints what is posted to them, and another all the rest.

    A framework looks through all its routes for each request, and has a ``send`` of its own in each
    of its layers, which each chunk of a stream would pass.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        """
        Args:
            endpoints: by their paths; what they raise goes to the caller.
            others: answers whatever else is asked for.
        """
        self._endpoints, self._others = endpoints, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._others
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._endpoints.get(scope["path"], app)
        await app(scope, receive, send)
