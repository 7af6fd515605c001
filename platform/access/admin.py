"""The admin API's part for API keys: who has one, and what it may do; never a key or its hash."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.access.live_keys import LiveKeys


class KeyState(BaseModel):
    """An API key as operators see it."""

    model_config = ConfigDict(frozen=True)
    name: str
    expires_at: datetime | None = None
    models: tuple[str, ...] = Field((), description="Models that it may use; none named: all.")
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    first_priority: int = 0
    refuse_late: bool = False


class KeysState(BaseModel):
    model_config = ConfigDict(frozen=True)
    asked_for: bool = Field(description="False: /v1 is open to whoever reaches it.")
    problem: str | None = Field(
        description="Why the newest keys file is not in use; null: it is, or there is none."
    )
    keys: tuple[KeyState, ...]


def build_keys_router(keys: LiveKeys, *, asked_for: bool) -> APIRouter:
    """The route ``/keys``; ``asked_for``: whether nobody may ask without a key."""
    router = APIRouter(prefix="/keys", tags=["API keys"])

    @router.get("")
    async def all_keys() -> KeysState:
        """The API keys and their limits, without secrets."""
        return KeysState(
            asked_for=asked_for,
            problem=keys.problem,
            keys=tuple(
                KeyState.model_validate(key.model_dump(include=set(KeyState.model_fields)))
                for key in keys.all
            ),
        )

    return router
