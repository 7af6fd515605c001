"""Policies that choose which waiting batch runs next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loomserve.routers.static_batching.base import StaticBatch

Next = Callable[[Sequence[StaticBatch], float], int]
"""Takes at least one batch and the time; returns the index of the next, the first of equals."""


def first(batches: Sequence[StaticBatch], now: float) -> int:
    """Choose the first in the batcher's own order."""
    return 0


def oldest(batches: Sequence[StaticBatch], now: float) -> int:
    """Choose the batch with the request that has waited the longest."""
    return min(range(len(batches)), key=lambda at: batches[at].arrived_s)


def hrrn(processing_s: Callable[[Sequence[StaticBatch]], Sequence[float]]) -> Next:
    """Highest response ratio next: chooses the batch with the greatest T_w / T_p (Magnus).

    T_w is how long a batch's oldest request has waited, T_p the batch's time by ``processing_s``,
    above 0. Short batches go first, and a batch that waits long enough goes too.
    """

    def highest(batches: Sequence[StaticBatch], now: float) -> int:
        seconds = processing_s(batches)
        return max(range(len(batches)), key=lambda at: (now - batches[at].arrived_s) / seconds[at])

    return highest
