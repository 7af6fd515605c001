"""First come, first served, in batches of a fixed size: Magnus's vanilla scheduling.

The configuration chooses it (``batch.offline_models[].batching``); by itself the platform takes S³.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, field_validator

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
    in_order_of_arrival,
)


class Fifo(BatchingPolicy):
    """Batches of ``size`` requests in the order of their arrival; the last batch has the rest. It
    ignores predictions, so ``size`` must be safe for the longest requests."""

    class Options(BatchingPolicy.Options):
        size: int | None = Field(None, ge=1, validate_default=True)

        @field_validator("size")
        @classmethod
        def _is_given(cls, size: int | None) -> int:
            if size is None:
                raise ValueError(
                    "fifo needs it: give the lines that fit into kv_cache_memory, however long"
                )
            return size

    suits = "oldest"

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        waiting, size = in_order_of_arrival(requests), self.options.size
        return [StaticBatch(tuple(waiting[at : at + size])) for at in range(0, len(waiting), size)]
