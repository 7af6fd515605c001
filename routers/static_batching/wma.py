"""Batches of little wasted memory access: Magnus's adaptive batcher.

Each iteration of a static batch reads the KV of all its tokens, padding and ended answers too.
Wasted memory access (WMA) counts those reads, in tokens; a request joins the waiting batch where it
wastes the least, if that is little enough.

The configuration chooses it (``batch.offline_models[].batching``); by itself the platform takes S³.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    FormingBatch,
    KvBudget,
    StaticBatch,
    in_order_of_arrival,
)


def wasted(request: BatchRequest, length: int, generation: int) -> int:
    """WMA_gen(p) + WMA_wait(p) of a member of a batch with L(B) and G(B).

    WMA_gen(p) = G(p)·(L(B) - L(p)): its padding, read until its answer ends. WMA_wait(p) = the sum
    of g + L(B) for g from G(p) to G(B), both included, as the paper writes it: all its tokens, read
    until the batch ends. So even a request that is alone counts one reading, G(B) + L(B).
    """
    own = request.predicted_tokens
    waiting = generation - own + 1
    return own * (length - request.input_tokens) + waiting * (own + generation + 2 * length) // 2


def wma(batch: StaticBatch) -> int:
    """WMA(B): the waste of the member that wastes the most."""
    length, generation = batch.length, batch.generation
    return max(wasted(one, length, generation) for one in batch.requests)


class Wma(BatchingPolicy):
    """A policy to which requests come one by one, in the order of their arrival.

    A request joins the batch whose WMA is the least with it, the oldest of equals, if that is below
    ``most_waste`` (Φ) and the batch still fits into memory; else it opens a batch. Of batches that
    have been formed so, any may be taken away and the others form again just the same: forming
    them anew before each batch is as good as keeping them.
    """

    class Options(BatchingPolicy.Options):
        most_waste: int = Field(ge=1)

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        forming: list[_Forming] = []
        for request in in_order_of_arrival(requests):
            least, joined = float(self.options.most_waste), None
            for one in forming:
                waste = one.wma_with(request, memory)
                if waste < least:
                    least, joined = waste, one
            if joined is None:
                forming.append(_Forming(request))
            else:
                joined.add(request)
        return [one.formed() for one in forming]


class _Forming(FormingBatch):
    """Waste falls with a member's length and with its answer's, so that who wastes the most is
    among those that no other undercuts in both; they are few, and the only ones looked at."""

    def __init__(self, first: BatchRequest) -> None:
        super().__init__(first)
        self._shortest = [first]

    def wma_with(self, request: BatchRequest, memory: KvBudget) -> float:
        """Infinite where it would not fit into memory."""
        if not self.holds(request, memory):
            return float("inf")
        length = max(self.length, request.input_tokens)
        generation = max(self.generation, request.predicted_tokens)
        return max(wasted(one, length, generation) for one in (request, *self._shortest))

    def add(self, request: BatchRequest) -> None:
        super().add(request)
        if not any(_undercuts(one, request) for one in self._shortest):
            self._shortest = [one for one in self._shortest if not _undercuts(request, one)]
            self._shortest.append(request)


def _undercuts(one: BatchRequest, other: BatchRequest) -> bool:
    return one.input_tokens <= other.input_tokens and one.predicted_tokens <= other.predicted_tokens
