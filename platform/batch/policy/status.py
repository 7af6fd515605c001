"""The states of a batch, as OpenAI names them, and which may follow which."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset(
        {Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING, Status.FINALIZING}
    ),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.FAILED: frozenset(),
    Status.COMPLETED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
"""A batch that ran out of time passes through ``finalizing`` too, while its files are written."""

ENDED = frozenset(status for status, after in TRANSITIONS.items() if not after)
CANCELLABLE = frozenset(s for s, after in TRANSITIONS.items() if Status.CANCELLING in after)


def stamp(status: Status) -> str | None:
    """The field of a batch that says when it came into this state."""
    return None if status is Status.VALIDATING else f"{status}_at"
