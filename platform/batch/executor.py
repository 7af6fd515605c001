"""Interface between the lane and what computes its lines."""

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
        owner: Name of the API key that it is computed for; empty: no key is needed.
        engine: Id of the engine that takes it; None: the platform knows no such model.
        left_s: Seconds until its batch's window ends.
        expected_tokens: Returns the predicted tokens of one answer, which change as lines finish.
        attempts: How often engines have failed on it.
    """

    owner: str
    path: str
    body: Mapping[str, object]
    request_id: str
    model: str
    engine: str | None
    left_s: float
    expected_tokens: Callable[[], float]
    attempts: int


class LineOutcome(Enum):
    """How an attempt at a line ended."""

    ANSWERED = "answered"
    """It has its answer, good or bad: another attempt would answer the same."""
    ENGINE_FAILED = "engine_failed"
    """An engine took it and failed."""
    ENGINE_ENDED = "engine_ended"
    """An engine took it and ended, perhaps because of it."""
    DEADLY = "deadly"
    """It has its answer: engines ended because of it, and no other is asked."""
    AWAY = "away"
    """No engine took it."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The result of a call: an HTTP status and a JSON body on one line. ``ended`` names the engine
    that ended, if it was another than the call's."""

    outcome: LineOutcome
    status: int
    body: bytes
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the platform; the lane admits each line to an engine that has room.

    Attributes:
        engines: Loads of the engines that take requests, by id; times are of this process's clock.
        predictor: Name of the predictor of its answers' lengths, if it has one.
        on_demand: Whether it comes with a line, where it has no engine.
    """

    max_model_len: int | None
    engines: Mapping[str, RoutingStats]
    predictor: str | None = None
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class QueuedModel:
    """A model whose executor queues lines and forms batches of them itself. Its queue and its batch
    have ``places`` lines at most together; 0: it is not ready."""

    max_model_len: int | None
    engine: str
    places: int
    predictor: str | None = None


@dataclass(frozen=True, slots=True)
class AliasedModels:
    """What an alias stands for: each line that names it is one of its models' by weight."""

    weights: Mapping[str, int]


Models = Mapping[str, ServedModel | QueuedModel]
KnownModels = Mapping[str, ServedModel | QueuedModel | AliasedModels]


class LineExecutor(Protocol):
    """Computes lines of batches."""

    async def models(self) -> KnownModels | None:
        """Models, ready or not, and aliases, by name; None while they are not known."""
        ...

    async def execute(self, call: LineCall) -> LineAnswer:
        """Compute a line; cancelling the call ends the work."""
        ...
