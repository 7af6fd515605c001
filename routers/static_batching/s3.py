"""Bin packing by predicted length: S³ (Jin et al., NeurIPS 2023), the scheduler's part.

S³ packs requests into memory by first fit decreasing: the longest predicted answer first, each into
the first batch that still has room for it. As they come in the order of their lengths, neighbours
are alike. It knows neither deadlines nor how long a request has waited. For answers that outgrow
their predictions see :func:`~loomserve.routers.static_batching.queue.halves`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
)


class S3(BatchingPolicy):
    """First fit decreasing; a bin's content is the memory of its padded batch."""

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        bins: list[_Bin] = []
        for request in sorted(requests, key=_decreasing):
            for one in bins:
                if one.has_room_for(request, memory):
                    one.add(request)
                    break
            else:
                bins.append(_Bin(request))
        return [StaticBatch(tuple(one.requests)) for one in bins]


def _decreasing(request: BatchRequest) -> tuple[int, int, float, str]:
    return -request.predicted_tokens, -request.input_tokens, request.arrived_s, request.id


class _Bin:
    """A batch that is being filled; its first request has the longest predicted answer."""

    def __init__(self, first: BatchRequest) -> None:
        self.requests = [first]
        self._generation = first.predicted_tokens
        self._length = first.input_tokens

    def has_room_for(self, request: BatchRequest, memory: KvBudget) -> bool:
        length = max(self._length, request.input_tokens)
        return memory.holds(len(self.requests) + 1, length, self._generation)

    def add(self, request: BatchRequest) -> None:
        self.requests.append(request)
        self._length = max(self._length, request.input_tokens)
