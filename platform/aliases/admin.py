"""The admin API's part for aliases."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body

from loomserve.platform.aliases.table import no_such_alias
from loomserve.platform.base.reply import Ask
from loomserve.platform.config import Alias
from loomserve.platform.state import AliasState

_EXAMPLES: dict[str, Any] = {
    "weights": {"value": {"stable": 95, "canary": 5}},
    "one model": {"value": "stable"},
    "sticky": {"value": {"models": {"stable": 95, "canary": 5}, "sticky": "key"}},
}


def build_aliases_router(ask: Ask) -> APIRouter:
    router = APIRouter(prefix="/aliases")

    @router.get("", response_model=list[AliasState])
    async def aliases() -> Any:
        """The aliases, and what they stand for."""
        return (await ask("state")).aliases

    @router.get("/{name:path}", response_model=AliasState)
    async def alias(name: str) -> Any:
        """One alias."""
        return _named(name, (await ask("state")).aliases)

    @router.put("/{name:path}", response_model=AliasState)
    async def put(name: str, alias: Annotated[Alias, Body(openapi_examples=_EXAMPLES)]) -> Any:
        """Make an alias, or have it stand for something else; written as in the configuration.

        Requests that come from now on are split so; those that run stay with their models.
        """
        return _named(name, (await ask("set_alias", name, alias)).aliases)

    @router.delete("/{name:path}", response_model=list[AliasState])
    async def delete(name: str) -> Any:
        """Delete an alias; requests for it that run go on."""
        return (await ask("set_alias", name, None)).aliases

    return router


def _named(name: str, aliases: tuple[AliasState, ...]) -> AliasState:
    for alias in aliases:
        if alias.name == name:
            return alias
    raise no_such_alias(name, (alias.name for alias in aliases))
