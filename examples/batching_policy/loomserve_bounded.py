"""First come, in batches that memory holds and that take no longer than is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
    in_order_of_arrival,
)


class Bounded(BatchingPolicy):
    """Remembers the seconds that a token of an answer took, whose time grows with the batch."""

    class Options(BatchingPolicy.Options):
        longest_s: float = Field(60.0, gt=0, description="In which a batch is to end.")

    suits = "oldest"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.token_s = 0.0

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        batches: list[StaticBatch] = []
        for request in in_order_of_arrival(requests):
            joined = StaticBatch((*(batches[-1].requests if batches else ()), request))
            size = len(joined.requests)
            takes_s = size * joined.generation * self.token_s
            fits = memory.holds(size, joined.length, joined.generation)
            if size > 1 and fits and takes_s <= self.options.longest_s:
                batches[-1] = joined
            else:
                batches.append(StaticBatch((request,)))
        return batches

    def ran(self, batch: StaticBatch, generated: int, seconds: float) -> None:
        self.token_s = seconds / (generated * len(batch.requests))
