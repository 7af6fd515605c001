"""The seam between lines that wait for a static batch and the process that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class WorkerGoneError(Exception):
    """The process that computes has ended, or could not start."""


@dataclass(frozen=True, slots=True)
class OfflineFacts:
    """What a model is, once it is loaded: tokens of its context, and bytes of a token's KV."""

    context: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class OfflineLine:
    """A request on its way to the process, to an endpoint's ``path``."""

    id: str
    path: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """OpenAI's object, and how many tokens were generated for it."""

    body: bytes
    tokens: int


class OfflineWorker(Protocol):
    """A process that has loaded a model. All methods raise :class:`WorkerGoneError`."""

    async def facts(self) -> OfflineFacts:
        """Once it is ready."""
        ...

    async def prompt_tokens(self, line: OfflineLine) -> int:
        """Raises :class:`BadRequest` for a line that the model does not answer."""
        ...

    async def run(self, lines: Sequence[OfflineLine]) -> Sequence[OfflineAnswer] | None:
        """The answers, once the last is complete; None: they ran out of KV memory together."""
        ...

    async def leave(self, line_id: str) -> None:
        """Nobody waits for that line any more; its batch need not go on for it."""
        ...

    def stop(self) -> None:
        """End the process, now."""
        ...
