"""Batches in the admin API: any key's can be seen and cancelled."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from loomserve.platform.base.reply import Ask
from loomserve.platform.state import BatchLaneState, BatchState


def build_batch_router(ask: Ask) -> APIRouter:
    """The routes under ``/batches``."""
    router = APIRouter(prefix="/batches", tags=["batches"])

    @router.get("", response_model=BatchLaneState)
    async def batches() -> Any:
        """Batches that have not ended, of all keys, and when they will be done."""
        return await ask("state")

    @router.get("/{batch_id}", response_model=BatchState)
    async def batch(batch_id: str) -> Any:
        """One batch."""
        return await ask("show", batch_id)

    @router.post("/{batch_id}/cancel", status_code=202, response_model=BatchState)
    async def cancel(batch_id: str) -> Any:
        """Cancel a batch; what has been answered is kept."""
        return await ask("cancel", batch_id)

    return router
