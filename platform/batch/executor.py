"""Interface between the lane and what computes its lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pydantic import Field

from loomserve.platform.base.errors import RequestError
from loomserve.platform.fleet.messages import LineRequest, ServedModel


class LineCall(LineRequest):
    """A line on its way to an engine."""

    model: str
    left_s: float = Field(description="Seconds until its batch's window ends.")
    expected_tokens: Callable[[], float]
    """Returns the predicted tokens of one answer, which change as lines finish."""
    attempts: int = Field(description="How often engines have failed on it.")


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

    @classmethod
    def of(
        cls, error: RequestError, outcome: LineOutcome = LineOutcome.ANSWERED, ended: str = ""
    ) -> LineAnswer:
        """An error of the platform's own; ``ANSWERED``: another attempt would be refused again."""
        return cls(outcome, error.status, json.dumps(error.body()).encode(), ended or None)


AWAY = LineAnswer(LineOutcome.AWAY, 503, b"{}")


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
