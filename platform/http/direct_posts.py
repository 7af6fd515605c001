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


def own_post(path: str, content_type: bytes, *headers: tuple[bytes, bytes]) -> Scope:
    """The scope of a request of this process's own to an application that it holds."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", content_type), *headers],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
