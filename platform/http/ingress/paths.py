"""Paths of requests: one way to write each, and what a path that does not exist was meant for."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from loomserve.platform.base.errors import BadRequest, NothingThere

# As RFC 3986 has the characters of a path; what it has not is written in percents.
_IN_PATHS = "/:@!$&'()*+,;=~"
_API = "/v1"
# Files of a page are relative to its path, so that there a slash at the end says something.
_PAGES = "/console"
_LONGEST = 128
# What other servers have, and what is the same here.
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/completion": "/v1/completions",
    "/infill": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/embed": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/v1/complete": "/v1/messages",
    "/v1/engines": "/v1/models",
}


def in_one_way(scope: Scope) -> dict[str, Any]:
    """Of a request's scope, what is other once its path is written in one way; nothing, mostly.

    Keys and tokens are asked for by the path, and routers go by it, so both must see the same.
    """
    path = scope["path"]
    if "//" not in path and not (path.endswith("/") and len(path) > 1):
        return {}
    while "//" in path:
        path = path.replace("//", "/")
    if path != f"{_PAGES}/":
        path = path.rstrip("/") or "/"
    return {"path": path, "raw_path": quote(path, safe=_IN_PATHS).encode()}


def check_segments(path: str) -> None:
    """
    Raises:
        BadRequest: a part of the path is ``.`` or ``..``, however it was written.
    """
    if "/." in path and not {".", ".."}.isdisjoint(path.split("/")):
        raise BadRequest("The path has a part that is . or .. only. Ask for the path it leads to.")


class Directions:
    """Names the endpoint that was meant by a path where there is nothing."""

    def __init__(self, endpoints: Collection[str]) -> None:
        """``endpoints``: those that clients may ask for, under ``/v1``; the likeliest first."""
        self._endpoints = tuple(endpoints)

    def given(self, error: NothingThere, path: str) -> NothingThere:
        """The error with a hint at the nearest endpoint, if one is near."""
        meant = self.nearest(path)
        if meant is None:
            return error
        return NothingThere(f"{error.message} Did you mean {meant}?")

    def nearest(self, path: str) -> str | None:
        path = path[:_LONGEST].lower()
        if path in ("/", _API):
            return None
        elsewhere = _ELSEWHERE.get(path)
        if elsewhere in self._endpoints:
            return elsewhere
        # Whatever stands before it: another server's prefix, /v1 twice or not at all.
        tail = f"{_API}/{path.rpartition(f'{_API}/')[2].lstrip('/')}"
        ends = [each for each in self._endpoints if path.endswith(each.removeprefix(_API))]
        below = [each for each in self._endpoints if tail.startswith(f"{each}/")]
        above = [each for each in self._endpoints if each.startswith(f"{tail}/")]
        near = difflib.get_close_matches(tail, self._endpoints, n=1, cutoff=0.8)
        longest = sorted(ends or below, key=len, reverse=True)
        return next(iter((*longest, *above, *near)), None)
