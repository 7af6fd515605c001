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
    FormingBatch,
    KvBudget,
    StaticBatch,
)


class S3(BatchingPolicy):
    """First fit decreasing; a bin's content is the memory of its padded batch."""

    def form(
        self, requests: Sequence[BatchRequest], memory: KvBudget, now: float
    ) -> list[StaticBatch]:
        bins: list[FormingBatch] = []
        for request in sorted(requests, key=_decreasing):
            for one in bins:
                if one.holds(request, memory):
                    one.add(request)
                    break
            else:
                bins.append(FormingBatch(request))
        return [one.formed() for one in bins]


def _decreasing(request: BatchRequest) -> tuple[int, int, float, str]:
    return -request.predicted_tokens, -request.input_tokens, request.arrived_s, request.id
