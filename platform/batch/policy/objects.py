"""Files and batches: what the lane keeps of them, a batch's states, and OpenAI's objects."""

from __future__ import annotations

import re
import uuid
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from loomserve.platform.requests import endpoints


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


ENDPOINTS = tuple(path for path, row in endpoints.ENDPOINTS.items() if row.in_batches)
INPUT = "batch"
OUTPUT = "batch_output"

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileRecord(_Record):
    """A file; times are Unix seconds."""

    id: str
    owner: str
    """Name of the API key that it belongs to; empty: no key is needed."""
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_openai(self) -> dict[str, Any]:
        own = self.model_dump(exclude={"owner"})
        return {"object": "file", **own, "status": "processed", "status_details": None}


class LineError(_Record):
    """An error in the input file, as in a batch's ``errors``."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(_Record):
    """A batch; times are Unix seconds."""

    id: str
    owner: str
    status: BatchStatus = BatchStatus.VALIDATING
    ending: BatchStatus | None = None
    """Status in which a batch that is being finalized will end."""
    endpoint: str
    input_file_id: str
    completion_window: str
    output_expires_s: int | None = None
    metadata: dict[str, str] | None = None
    errors: tuple[LineError, ...] | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def unanswered(self) -> int:
        return self.total - self.completed - self.failed

    def to_openai(self) -> dict[str, Any]:
        ours = {"owner", "ending", "output_expires_s", "errors", "total", "completed", "failed",
                "input_tokens", "cached_tokens", "output_tokens"}  # fmt: skip
        errors = None
        if self.errors is not None:
            errors = {"object": "list", "data": [error.model_dump() for error in self.errors]}
        return {
            "object": "batch",
            **self.model_dump(mode="json", exclude=ours),
            "errors": errors,
            "request_counts": self.model_dump(include={"total", "completed", "failed"}),
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
        }


def new_id(prefix: str) -> str:
    """A new id such as ``file-…``: 128 random bits, so that nobody guesses another's."""
    return prefix + uuid.uuid4().hex


def window_seconds(window: object) -> int | None:
    """Seconds of a completion window such as ``24h`` (s, m, h, d); None if it is none."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    return int(match[1]) * _SECONDS[match[2]] if match else None
