"""What the batch lane does: behind ``GET /admin/v1/batches``."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel


class BatchState(StateModel):
    """A batch as operators see it; times are Unix seconds."""

    id: str
    api_key: str = Field(description="The name of the key that it belongs to; empty: no key.")
    status: str = Field(description="As in OpenAI's API.")
    endpoint: str
    created_at: int
    expires_at: int
    total: int = Field(description="Lines; 0 before they are validated.")
    completed: int
    failed: int
    in_flight: int = Field(description="Lines that engines have at this moment.")
    eta_s: float | None = Field(
        description="Seconds until it is done at the present pace; null while nothing tells."
    )
    late: bool = Field(description="True: it is about to miss the end of its window.")


class OfflineModelState(StateModel):
    """An offline model; counts are since the lane started."""

    name: str
    ready: bool = Field(description="False: its process is starting, or starting again.")
    problem: str | None = Field(description="Why its process ended last, until it is ready.")
    batches: int = Field(description="Static batches that were completed.")
    splits: int = Field(description="Static batches that ran out of KV memory.")


class BatchLaneState(StateModel):
    """What the batch lane does: behind ``GET /admin/v1/batches`` and ``loomserve batch``."""

    batches: tuple[BatchState, ...] = Field(description="Those that have not ended.")
    by_status: dict[str, int] = Field(description="Batches that are remembered, ended ones too.")
    answered_lines: int = Field(description="Lines answered well since the lane started.")
    failed_lines: int = Field(description="Lines answered with an error since then.")
    retries: int = Field(description="Attempts that engines failed on since then.")
    offline_models: tuple[OfflineModelState, ...] = ()
