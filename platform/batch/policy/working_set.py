"""The batches in progress whose lines are in memory; those of all others wait in the store."""

from __future__ import annotations

from collections.abc import Iterable

from loomserve.platform.batch.policy.objects import BatchRecord

MOST_LINES = 100_000
"""Lines in memory, unless one batch alone has more."""


def may_join(batch: BatchRecord, members: Iterable[BatchRecord]) -> bool:
    """Whether a batch's lines may come into memory, beside those of the members.

    Half of the room is left to keys that have nothing in it yet.
    """
    others = list(members)
    if not others:
        return True
    newcomer = all(other.owner != batch.owner for other in others)
    room = MOST_LINES if newcomer else MOST_LINES // 2
    return sum(other.unanswered for other in others) + batch.unanswered <= room
