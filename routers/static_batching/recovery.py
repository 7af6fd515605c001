"""Splits a batch that ran out of memory."""

from __future__ import annotations

from loomserve.routers.static_batching.base import StaticBatch


def halves(batch: StaticBatch) -> tuple[StaticBatch, StaticBatch]:
    """Split a batch into two; of an odd number the first has one request more (Magnus).

    The longest by prompt and predicted answer come into one half, so the other is padded less.

    Raises:
        ValueError: there is one request only, which needs more memory than there is.
    """
    if len(batch.requests) < 2:
        raise ValueError(f"request {batch.requests[0].id} cannot be split, it needs more memory")
    shortest_first = sorted(
        batch.requests, key=lambda one: (one.input_tokens + one.predicted_tokens, one.id)
    )
    middle = (len(shortest_first) + 1) // 2
    return StaticBatch(tuple(shortest_first[:middle])), StaticBatch(tuple(shortest_first[middle:]))
