"""The seam between plans and the mechanisms that carry out their actions: one actuator a kind.

An actuator keeps nothing that a restart would lose: what it knows of an action is the action's
*record*. Each call may come again, after a restart or because its answer was lost; it then does
what is left to be done.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeVar

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.plans.plans import ActionRecord
from loomserve.platform.rebalancing.policy.actions import Action

Record = TypeVar("Record", bound=ActionRecord)


class ActionOutcome(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # all is as it was before
    ABORTED = "aborted"  # all is as it was before


class Progress(Frozen):
    """How far an action is: bytes moved and seconds that an engine stood still so far; for a
    person, why it failed or what it waits for."""

    outcome: ActionOutcome = ActionOutcome.RUNNING
    moved_bytes: int = Field(0, ge=0)
    paused_s: float = Field(0.0, ge=0)
    message: str = ""


class Actuator(Protocol[Record]):
    """Carries out actions of one kind, one at a time."""

    def prepare(self, name: str, action: Action) -> Record:
        """The record of an action that is about to begin, under a unique name; changes nothing.
        Raises RequestError, which says why, if the action cannot be carried out."""
        ...

    async def begin(self, record: Record) -> None:
        """Begin the action. Raises RequestError if the action cannot be carried out; the message
        says why."""
        ...

    async def abort(self, record: Record) -> None:
        """Take the action back if it is not too late; ``progress`` tells whether it was."""
        ...

    async def progress(self, record: Record) -> Progress:
        """How far the action is. Called about once a second; does what is left to be done."""
        ...
