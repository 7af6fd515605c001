"""Who computes the lines: the seam between the lane and the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from loomserve.routers.snapshot import RoutingStats


@dataclass(frozen=True, slots=True)
class LineCall:
    """A line on its way to an engine.

    Attributes:
        owner: The API key in whose name it is computed; empty where none is needed.
        engine: Which engine takes it; None: the platform knows no such model.
        expected_tokens: Of one answer, as predicted when it is asked; that changes as lines finish.
        attempts: How often engines have failed on it.
    """

    owner: str
    path: str
    body: Mapping[str, object]
    request_id: str
    engine: str | None
    expected_tokens: Callable[[], float]
    attempts: int


class LineOutcome(Enum):
    ANSWERED = "answered"
    """Well or not: another attempt would answer the same."""
    ENGINE_FAILED = "engine_failed"
    """An engine took it and failed."""
    AWAY = "away"
    """Nobody took it."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What became of a call: an HTTP status and a JSON body, one line of text."""

    outcome: LineOutcome
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose engines take requests; the lane admits a line to one that has room.

    Attributes:
        engines: Those that take requests, by id.
        predictor: What predicts its answers' lengths, if anything.
    """

    max_model_len: int | None
    engines: Mapping[str, RoutingStats]
    predictor: str | None = None


@dataclass(frozen=True, slots=True)
class QueuedModel:
    """A model whose lines wait with their executor, which forms batches of them itself.

    Attributes:
        engine: The one that it has, by id.
        places: How many lines it takes at once, those that wait there too; 0: it is not ready.
        predictor: What predicts its answers' lengths, if anything.
    """

    max_model_len: int | None
    engine: str
    places: int
    predictor: str | None = None


class LineExecutor(Protocol):
    async def models(self) -> Mapping[str, ServedModel | QueuedModel] | None:
        """The models, ready or not, by name; None while nobody can tell."""
        ...

    async def execute(self, call: LineCall) -> LineAnswer:
        """Compute a line; cancelling it ends the work."""
        ...
