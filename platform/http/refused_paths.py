"""Endpoints that people know from elsewhere and that are not here: what to use instead."""

from __future__ import annotations

from loomserve.platform.base.errors import NotFound, NothingThere

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


def nothing_at(path: str, *, admin: bool = False) -> NotFound:
    """What a client is told of a path at which there is nothing.

    Args:
        path: what was asked for.
        admin: whether to say where the admin API is.
    """
    for root, why in _REFUSED.items():
        if path == root or path.startswith(root + "/"):
            return NotFound(f"{path} is not served: {why}.")
    where = "The OpenAI API is under /v1" + (", the admin API under /admin/v1." if admin else ".")
    return NothingThere(f"There is nothing at {path}. {where}")
