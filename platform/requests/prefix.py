"""What a request's prompt begins with, for routers that look at it."""

from __future__ import annotations

from loomserve.platform.requests.client_body import texts_of
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.routers.block_keys import text_keys

# In the order in which the model reads them.
_TEXTS = ("system", "instructions", "messages", "prompt", "input")


def prefix_keys(request: EngineRequest) -> tuple[bytes, ...]:
    """Keys of the blocks of the prompt's JSON, as the client sent it.

    JSON is not parsed: a client writes what it sends again in the same way, and a conversation's
    next turn goes on where the last one closed its list.
    """
    texts = request.texts or texts_of(request.encoded)
    salt = request.fields.get("cache_salt")
    return text_keys(
        b"".join(texts[name] for name in _TEXTS if name in texts),
        model=str(request.fields.get("model")),
        salt=None if salt is None else str(salt),
    )
