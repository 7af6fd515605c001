"""First come, first served, in batches of a fixed size: Magnus's vanilla scheduling.

The configuration chooses it (``batch.offline_models[].batching``); by itself the platform takes S³.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loomserve.routers.static_batching.base import (
    BatchRequest,
    KvBudget,
    StaticBatch,
    in_order_of_arrival,
)


@dataclass(frozen=True, slots=True)
class Fifo:
    """Batcher of ``size`` requests in the order of their arrival; the last batch has the rest.

    It ignores predictions, so ``size`` must be safe for the longest requests.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a batch of {self.size} requests serves none: give at least 1")

    @classmethod
    def for_longest(cls, memory: KvBudget, input_tokens: int, output_tokens: int) -> Fifo:
        """Make a batcher of the largest size with which requests up to these lengths always fit."""
        return cls(memory.bytes // (memory.token_bytes * (input_tokens + output_tokens)))

    def __call__(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        waiting = in_order_of_arrival(requests)
        return [
            StaticBatch(tuple(waiting[at : at + self.size]))
            for at in range(0, len(waiting), self.size)
        ]
