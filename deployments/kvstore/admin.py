"""Admin API of the KV store: read its contents, flush it, pin blocks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.types import Receive

from loomserve.deployments.kvstore.stores import Stores
from loomserve.kvstore.server.protocol import PROMPT_CHAIN
from loomserve.platform.base.errors import BadRequest, NotFound, Unavailable, UnknownModel
from loomserve.platform.fleet.messages import KvAccess
from loomserve.platform.state import KvState

# Sends a request body to an engine of its model, under the name of an API key, and returns status
# and body of the answer.
Complete = Callable[[str, dict[str, Any], str | None, Receive], Awaitable[tuple[int, bytes]]]


class FlushRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(None, description="Model whose blocks are forgotten; null: all.")


class Flushed(BaseModel):
    blocks: int = Field(description="Blocks that were in memory and are forgotten.")


class PinRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    messages: list[dict[str, Any]] | None = Field(
        None, description="The beginning of a chat, such as a system prompt."
    )
    prompt: str | list[int] | None = Field(None, description="Or the beginning of a prompt.")
    pinned: bool = Field(description="True: keep its blocks; false: let them go.")
    api_key: str | None = Field(
        None, description="Name of the API key that the blocks belong to, if tenants are isolated."
    )

    @model_validator(mode="after")
    def _one_text(self) -> PinRequest:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either messages or prompt")
        return self


class Pinned(BaseModel):
    prompt_tokens: int = Field(description="Tokens of the text, of which whole blocks are kept.")
    blocks: int = Field(
        description="Blocks pinned or let go; 0: the text is too short, or there was no room."
    )


def build_kv_router(
    access: KvAccess | None, tenants: Callable[[], Collection[str]], complete: Complete
) -> APIRouter:
    """Routes under ``/kv`` to the stores; without any they answer that there is none.

    ``tenants`` are the API keys whose blocks are kept apart at present; none: all share.
    ``complete`` has an engine compute a text.
    """
    router = APIRouter(prefix="/kv", tags=["KV store"])

    def stores() -> Stores:
        if access is None:
            raise NotFound("there is no KV store: add a kvstore section to the configuration")
        return Stores(access)

    @router.get("")
    async def usage() -> KvState:
        """What the KV store holds, and how each model used it since the store started."""
        return await stores().usage()

    @router.post("/flush")
    async def flush_model(request: FlushRequest) -> Flushed:
        """Forget the blocks that no request reads at this moment and nobody pinned."""
        asked = stores()
        if request.model is not None:
            known = [model.model for model in (await asked.usage()).models]
            if request.model not in known:
                raise UnknownModel(
                    f"the KV store holds nothing of {request.model!r}; it knows: "
                    f"{', '.join(known) or 'no model yet'}",
                    param="model",
                )
        return Flushed(blocks=await asked.flush(request.model or ""))

    @router.post("/pin")
    async def pin_text(request: PinRequest, http: Request) -> Pinned:
        """Keep the blocks of a text in the store, or let them go. An engine computes it once."""
        asked, isolated = stores(), tenants()
        if isolated and request.api_key not in isolated:
            raise BadRequest(
                "tenants are isolated, so say whose blocks: api_key is one of "
                f"{', '.join(isolated)}",
                param="api_key",
            )
        status, body = await complete(*_one_token(request), request.api_key, http.receive)
        answer = json.loads(body)
        if status >= 400:
            raise BadRequest(answer["error"]["message"], param=answer["error"].get("param"))
        chain = (answer.get("kv_transfer_params") or {}).get(PROMPT_CHAIN)
        blocks = await _pin(asked, chain, request.pinned) if chain else 0
        return Pinned(prompt_tokens=answer["usage"]["prompt_tokens"], blocks=blocks)

    return router


def _one_token(request: PinRequest) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that makes an engine compute the text's blocks."""
    path = "/v1/completions" if request.messages is None else "/v1/chat/completions"
    body = request.model_dump(include={"model", "messages", "prompt"}, exclude_none=True)
    body |= {"max_tokens": 1, "kv_transfer_params": {PROMPT_CHAIN: True}}
    return path, body


async def _pin(stores: Stores, chain: dict[str, Any], pinned: bool) -> int:
    """Pin or unpin a chain as an engine reported it; returns how many blocks that concerned."""
    names, keys = map(bytes.fromhex, chain["namespaces"]), bytes.fromhex(chain["keys"])
    try:
        return await stores.pin(list(names), keys, pinned=pinned)
    except Unavailable:
        return 0  # what a store that is away held is gone
