"""The queue before a static engine: requests wait, batches leave. No clock of its own."""

from __future__ import annotations

from dataclasses import replace

from loomserve.routers.static_batching.base import Batcher, BatchRequest, KvBudget, StaticBatch
from loomserve.routers.static_batching.next_batch import Next
from loomserve.routers.static_batching.recovery import halves


class BatchQueue:
    """Forms batches of what waits whenever the engine is idle.

    A batch that ran out of memory comes back as two halves, which nothing joins: by its predicted
    lengths it would have fitted, so that these tell nothing about what else does.
    """

    def __init__(self, batcher: Batcher, choose: Next, memory: KvBudget) -> None:
        self._batcher = batcher
        self._choose = choose
        self._memory = memory
        self._waiting: dict[str, BatchRequest] = {}
        self._apart: list[StaticBatch] = []

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + sum(len(one.requests) for one in self._apart)

    def add(self, request: BatchRequest) -> None:
        """Raises ``ValueError`` for an id that waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} waits already")
        self._waiting[request.id] = request

    def add_alone(self, request: BatchRequest) -> None:
        """One that nothing may join: it is suspected of what became of its batch."""
        self._apart.append(StaticBatch((request,)))

    def predict(self, request_id: str, tokens: int) -> None:
        """Its answer is now predicted to have so many tokens; what nothing joins stays as it is."""
        if request_id in self._waiting:
            known = self._waiting[request_id]
            self._waiting[request_id] = replace(known, predicted_tokens=tokens)

    def withdraw(self, request_id: str) -> None:
        """Nobody wants its answer any more; one that does not wait here is passed over."""
        self._waiting.pop(request_id, None)
        left = [[one for one in batch.requests if one.id != request_id] for batch in self._apart]
        self._apart = [StaticBatch(tuple(requests)) for requests in left if requests]

    def take(self, now: float) -> StaticBatch | None:
        """The batch to run now; None if nothing waits."""
        formed = self._batcher(list(self._waiting.values()), self._memory, now)
        batches = [*self._apart, *formed]
        if not batches:
            return None
        at = self._choose(batches, now)
        if at < len(self._apart):
            return self._apart.pop(at)
        for request in batches[at].requests:
            del self._waiting[request.id]
        return batches[at]

    def out_of_memory(self, batch: StaticBatch) -> BatchRequest | None:
        """Queue the halves of a batch that was taken; a lone request comes back: it never fits."""
        if len(batch.requests) == 1:
            return batch.requests[0]
        self._apart += halves(batch)
        return None
