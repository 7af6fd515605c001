"""Queue before an engine of static batches, and which batch is next; the caller gives the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
)

Next = Callable[[Sequence[StaticBatch], float], int]
"""Takes at least one batch and the time; returns the index of the next, the first of equals."""


def first(batches: Sequence[StaticBatch], now: float) -> int:
    """Choose the first in the batcher's own order."""
    return 0


def oldest(batches: Sequence[StaticBatch], now: float) -> int:
    """Choose the batch with the request that has waited the longest."""
    return min(range(len(batches)), key=lambda at: batches[at].arrived_s)


def hrrn(processing_s: Callable[[Sequence[StaticBatch]], Sequence[float]]) -> Next:
    """Highest response ratio next: chooses the batch with the greatest T_w / T_p (Magnus). T_w is
    how long a batch's oldest request has waited, T_p the batch's time by ``processing_s``, above 0.
    Short batches go first, and a batch that waits long enough goes too."""

    def highest(batches: Sequence[StaticBatch], now: float) -> int:
        seconds = processing_s(batches)
        return max(range(len(batches)), key=lambda at: (now - batches[at].arrived_s) / seconds[at])

    return highest


def halves(batch: StaticBatch) -> tuple[StaticBatch, StaticBatch]:
    """Split a batch into two; of an odd number the first has one request more (Magnus). The longest
    by prompt and predicted answer come into one half, so the other is padded less. Raises
    ValueError if there is one request only, which needs more memory than there is."""
    if len(batch.requests) < 2:
        raise ValueError(f"request {batch.requests[0].id} cannot be split, it needs more memory")
    shortest_first = sorted(
        batch.requests, key=lambda one: (one.input_tokens + one.predicted_tokens, one.id)
    )
    middle = (len(shortest_first) + 1) // 2
    return StaticBatch(tuple(shortest_first[:middle])), StaticBatch(tuple(shortest_first[middle:]))


class BatchQueue:
    """Queue that requests enter and batches leave; it forms batches when the engine is idle.

    A batch that ran out of memory comes back as two halves, which nothing joins: by its predicted
    lengths it fitted, so these do not tell what else fits.
    """

    def __init__(self, policy: BatchingPolicy, choose: Next, memory: KvBudget) -> None:
        self._policy = policy
        self._choose = choose
        self._memory = memory
        self._waiting: dict[str, BatchRequest] = {}
        self._apart: list[StaticBatch] = []

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting) + sum(len(one.requests) for one in self._apart)

    def add(self, request: BatchRequest) -> None:
        """Let a request wait. Raises ValueError if one with this id waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} waits already")
        self._waiting[request.id] = request

    def add_alone(self, request: BatchRequest) -> None:
        """Let a request wait that nothing may join, as its process may have died of it."""
        self._apart.append(StaticBatch((request,)))

    def predict(self, request_id: str, tokens: int) -> None:
        """Update a request's predicted answer length; one that nothing may join keeps its own."""
        if request_id in self._waiting:
            known = self._waiting[request_id]
            self._waiting[request_id] = replace(known, predicted_tokens=tokens)

    def withdraw(self, request_id: str) -> None:
        """Remove a request, if it waits here."""
        self._waiting.pop(request_id, None)
        left = [[one for one in batch.requests if one.id != request_id] for batch in self._apart]
        self._apart = [StaticBatch(tuple(requests)) for requests in left if requests]

    def take(self, now: float) -> StaticBatch | None:
        """Take out the batch to run now; None: nothing waits."""
        formed = self._policy.form(list(self._waiting.values()), self._memory, now)
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
        """Queue the halves of a taken batch; return a lone request, which never fits."""
        if len(batch.requests) == 1:
            return batch.requests[0]
        self._apart += halves(batch)
        return None
