"""Interface between an offline model's queue and the process that computes its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class WorkerGoneError(Exception):
    """The process has ended, or could not start."""


@dataclass(frozen=True, slots=True)
class OfflineFacts:
    """Facts of a loaded model: tokens of its context, and bytes of one token's KV."""

    context: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class OfflineLine:
    """A request for an endpoint's ``path``, on its way to the process."""

    id: str
    path: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """OpenAI's answer object as JSON, and the number of generated tokens."""

    body: bytes
    tokens: int


class OfflineWorker(Protocol):
    """A process that computes one model. All methods may raise :class:`WorkerGoneError`."""

    async def facts(self) -> OfflineFacts:
        """Wait until the model is loaded, and return its facts."""
        ...

    async def prompt_tokens(self, line: OfflineLine) -> int:
        """Tokens of a line's prompt. Raises BadRequest if the model cannot answer the line."""
        ...

    async def run(self, lines: Sequence[OfflineLine]) -> Sequence[OfflineAnswer] | None:
        """Compute a batch and return its answers; None: it ran out of KV memory."""
        ...

    async def leave(self, line_id: str) -> None:
        """Withdraw a line from the running batch, which need not go on for it."""
        ...

    def stop(self) -> None:
        """End the process at once."""
        ...
