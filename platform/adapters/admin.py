"""The admin API's part for adapters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.adapters.table import no_such_adapter
from loomserve.platform.base.errors import BadRequest, UnknownModel
from loomserve.platform.base.reply import Ask
from loomserve.platform.config import check_model_name
from loomserve.platform.state import AdapterState, PlatformState


class AdapterRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    source: str = Field(
        min_length=1,
        description="A PEFT folder, relative to the configuration's; a remote one; or a hub id.",
    )


def build_adapters_router(ask: Ask) -> APIRouter:
    router = APIRouter(prefix="/models/{model:path}/adapters")

    @router.get("", response_model=list[AdapterState])
    async def adapters(model: str) -> Any:
        """A model's adapters, and which replicas have each."""
        return _of(model, await ask("state"))

    @router.get("/{name:path}", response_model=AdapterState)
    async def adapter(model: str, name: str) -> Any:
        """One adapter of a model."""
        return _named(name, model, await ask("state"))

    @router.put("/{name:path}", response_model=AdapterState)
    async def put(model: str, name: str, request: Annotated[AdapterRequest, Body()]) -> Any:
        """Load an adapter, or have other weights under its name; gateways know within a second.

        Requests that run go on with the weights that they began with.
        """
        try:
            check_model_name(name)
        except ValueError as error:
            raise BadRequest(str(error), param="name") from None
        return _named(name, model, await ask("set_adapter", model, name, request.source))

    @router.delete("/{name:path}", response_model=list[AdapterState])
    async def delete(model: str, name: str) -> Any:
        """Unload an adapter; requests for it that run go on."""
        return _of(model, await ask("set_adapter", model, name, None))

    return router


def _of(model: str, state: PlatformState) -> tuple[AdapterState, ...]:
    known = {each.name: each for each in state.models}
    if model not in known:
        raise UnknownModel(f"there is no model {model!r}; models: {', '.join(known) or 'none'}")
    return known[model].adapters


def _named(name: str, model: str, state: PlatformState) -> AdapterState:
    adapters = {adapter.name: adapter for adapter in _of(model, state)}
    if name not in adapters:
        raise no_such_adapter(model, name, adapters)
    return adapters[name]
