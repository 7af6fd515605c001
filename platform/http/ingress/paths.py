"""Paths of requests: one way to write each, and what to use instead of one that is not here."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from loomserve.platform.base.errors import BadRequest, NotFound, NothingThere

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
_NO_STATE = "it would keep state between requests, and the platform keeps none"
_CONVERSE = f"{_NO_STATE}; send the whole conversation to /v1/responses or /v1/chat/completions"
_NOT_SERVED = "no model that vLLM serves here makes that"
_REFUSED = {
    "/v1/responses": f"an answer cannot be asked for again: {_CONVERSE}",
    "/v1/conversations": _CONVERSE,
    "/v1/assistants": _CONVERSE,
    "/v1/threads": _CONVERSE,
    "/v1/vector_stores": f"{_NO_STATE}; keep the vectors of /v1/embeddings in a database",
    "/v1/realtime": "it needs a session over a websocket; send recordings to "
    "/v1/audio/transcriptions",
    "/v1/audio/speech": _NOT_SERVED,
    "/v1/images": _NOT_SERVED,
    "/v1/videos": _NOT_SERVED,
    "/v1/moderations": "ask a model that classifies, at /v1/classify",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/uploads": "send the whole file to /v1/files",
    "/v1/messages/batches": "send a file of requests to /v1/batches",
    "/v1/chat/completions/batch": "send a file of requests to /v1/batches",
    "/v1/load_lora_adapter": "operators load adapters by the admin API",
    "/v1/unload_lora_adapter": "operators unload adapters by the admin API",
    "/cohere/v2/chat": "send chats to /v1/chat/completions",
    "/invocations": "ask the endpoint itself, such as /v1/chat/completions",
    "/inference/v1/generate": "send tokens as the prompt of /v1/completions",
    "/generative_scoring": "ask /v1/completions for logprobs",
}


def in_one_way(scope: Scope) -> dict[str, Any]:
    """The parts of a scope that change when its path is normalised; mostly none. Authentication and
    routers both go by the path, so they must see the same."""
    path = scope["path"]
    if "//" not in path and not (path.endswith("/") and len(path) > 1):
        return {}
    while "//" in path:
        path = path.replace("//", "/")
    if path != f"{_PAGES}/":
        path = path.rstrip("/") or "/"
    return {"path": path, "raw_path": quote(path, safe=_IN_PATHS).encode()}


def check_segments(path: str) -> None:
    """Raises BadRequest if a part of the path is ``.`` or ``..``, however it was written."""
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


def nothing_at(path: str, *, admin: bool = False) -> NotFound:
    """The error for a path at which there is nothing; ``admin``: it says where the admin API is."""
    for root, why in _REFUSED.items():
        if path == root or path.startswith(root + "/"):
            return NotFound(f"{path} is not served: {why}.")
    where = "The OpenAI API is under /v1" + (", the admin API under /admin/v1." if admin else ".")
    return NothingThere(f"There is nothing at {path}. {where}")
