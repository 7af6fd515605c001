"""The admin API's part for traces: whether there are some, and where they are looked at."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.config import Tracing


class TracingState(BaseModel):
    model_config = ConfigDict(frozen=True)
    enabled: bool = Field(description="Whether traces are sent to a collector.")
    trace_url: str | None = Field(
        description="Page of a trace, with {trace_id} in the place of its id; null: none is known."
    )


def build_tracing_router(tracing: Tracing | None) -> APIRouter:
    """The route ``/tracing``; None: there are no traces."""
    router = APIRouter(prefix="/tracing", tags=["traces"])
    state = TracingState(
        enabled=tracing is not None, trace_url=tracing.trace_url if tracing is not None else None
    )

    @router.get("")
    async def traces() -> TracingState:
        """Whether requests have traces, and where they can be looked at."""
        return state

    return router
