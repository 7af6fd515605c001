"""The admin API's paths for lending: show loans, switch pairs, end loans."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.base.reply import Ask
from loomserve.platform.state import LendingState


class PairRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    enabled: bool = Field(description="False: end the pair's loans and open none.")


def build_lending_router(ask: Ask) -> APIRouter:
    """The routes under ``/lending``."""
    router = APIRouter(prefix="/lending", tags=["lending"])

    @router.get("", response_model=LendingState)
    async def lending() -> Any:
        """Models that lend or borrow, pairs that may, and the loans that there are."""
        return await ask("lending")

    # One parameter, for both names may contain slashes.
    @router.put("/pairs/{pair:path}", status_code=202, response_model=LendingState)
    async def switch_pair(
        pair: Annotated[str, Path(description="BORROWER/LENDER, the names of two models.")],
        request: PairRequest,
    ) -> Any:
        """Let a model borrow from another, or not; loans of a pair that may not are drained."""
        return await ask("set_pair", pair, request.enabled)

    @router.post("/loans/{name}/drain", status_code=202, response_model=LendingState)
    async def drain_loan(name: str) -> Any:
        """End a loan once no request's KV is there; another may follow after a minute."""
        return await ask("drain_loan", name)

    return router
