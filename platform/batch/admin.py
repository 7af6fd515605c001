"""The admin API's part for the batch lane: see any key's batches, cancel them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from loomserve.platform.state import BatchLaneState, BatchState

Ask = Callable[..., Awaitable[dict[str, Any]]]
"""Calls a method of the lane: its answer, or its error and status."""


def build_batch_router(ask: Ask) -> APIRouter:
    """The routes under ``/batches``."""
    router = APIRouter(prefix="/batches", tags=["batches"])

    async def one(method: str, batch_id: str) -> Any:
        answer = await ask(method, batch_id)
        if "error" in answer:
            return JSONResponse({"error": answer["error"]}, status_code=answer["status"])
        return answer

    @router.get("", response_model=BatchLaneState)
    async def batches() -> Any:
        """Batches that have not ended, of all keys, and when they will be done."""
        return await ask("state")

    @router.get("/{batch_id}", response_model=BatchState)
    async def batch(batch_id: str) -> Any:
        """One batch."""
        return await one("show", batch_id)

    @router.post("/{batch_id}/cancel", status_code=202, response_model=BatchState)
    async def cancel(batch_id: str) -> Any:
        """Cancel a batch; what has been answered is kept."""
        return await one("cancel", batch_id)

    return router
