"""The states of a batch, and the transitions between them."""

from __future__ import annotations

from enum import StrEnum


class BatchStatus(StrEnum):
    """State of a batch, named as in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {
            BatchStatus.IN_PROGRESS,
            BatchStatus.FAILED,
            BatchStatus.CANCELLING,
            BatchStatus.FINALIZING,
        }
    ),
    BatchStatus.IN_PROGRESS: frozenset(
        {BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.FAILED}
    ),
    BatchStatus.FINALIZING: frozenset(
        {BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED}
    ),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED, BatchStatus.FAILED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}
"""Allowed transitions.

A batch that expires or fails in progress too is ``finalizing`` while its files are written; one
that cannot even be ended fails where it stands.
"""

ENDED = frozenset(status for status, after in TRANSITIONS.items() if not after)
CANCELLABLE = frozenset(s for s, after in TRANSITIONS.items() if BatchStatus.CANCELLING in after)


def stamp(status: BatchStatus) -> str | None:
    """Name of a batch's field for the time when it entered this state; the first state has none."""
    return None if status is BatchStatus.VALIDATING else f"{status}_at"
